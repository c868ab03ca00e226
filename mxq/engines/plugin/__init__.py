"""What mxq adds to vLLM's build for processors: MXFP4, emulated, and norms of DFlash drafters that come out right.

vLLM finds :func:`register` by the entry point ``mxq`` of the group ``vllm.general_plugins``, in whichever environment
both are installed, and calls it in every process that it starts. On GPUs it does nothing at all. A part that does not
fit the version of vLLM that is there stays out, with a line in the log; ``VLLM_PLUGINS=`` keeps all of it out.
"""

import importlib

PARTS = ("mxfp4", "norms")


def register() -> None:
    """Install what this vLLM lacks; more than once is no more than once."""
    try:
        from vllm.logger import init_logger
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        # vLLM's own handlers print what is logged below its name.
        logger = init_logger("vllm.plugins.mxq")
    except Exception:  # a vLLM of another shape: none of our business
        return
    for part in PARTS:
        try:
            importlib.import_module(f"{__name__}.{part}").install(logger)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            logger.warning("mxq's plugin %r does not fit this vLLM and stays out of it (%s)", part, said)
