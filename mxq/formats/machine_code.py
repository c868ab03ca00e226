"""Machine code for this processor, made by LLVM and kept in the user's cache directory.

numba does that too, and takes a second of every process to import itself and to look at what it kept: as long as it
takes to quantize gigabytes. LLVM by itself is there in a twentieth of a second.
"""

import contextlib
import ctypes
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from mxq.files import atomic_write

_DIGEST, _LARGEST = 32, 1 << 24
_lock = threading.Lock()
_engines: list[Any] = []  # what functions are called in


def function(name: str, source: Callable[[str], str], version: bytes, types: Sequence[Any]) -> Callable[..., None]:
    """Return a function that returns nothing and that holds no lock of Python's while it runs.

    Args:
        name: its name.
        source: what writes a module with a function of that name, in LLVM's language.
        version: what changes whenever the source does, which is not written where its machine code was kept.
        types: of ctypes, one for each argument.
    """
    with _lock:
        target, features = _processor()
        made_of = (name, version, Path(__file__).read_bytes(), llvmlite.__version__, llvm.llvm_version_info)
        made_for = (target.triple, llvm.get_host_cpu_name(), features)
        directory, key = _directory(), hashlib.sha256(repr((made_of, made_for)).encode()).hexdigest()
        kept = None if directory is None else directory / f"{key[:32]}.o"
        code = None if kept is None else _read(kept)
        if code is None:
            code = _compile(source(name), target, features)
            if kept is not None:
                _keep(kept, code)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine(target, features))
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        _engines.append(engine)
        return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name))


@contextlib.contextmanager
def loop(builder: Any, count: Any) -> Iterator[Any]:
    """Repeat the instructions that are written in the block, with a number that counts from 0 to below ``count``."""
    before = builder.block
    head, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(count.type)
    index.add_incoming(count.type(0), before)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    yield index
    index.add_incoming(builder.add(index, count.type(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def _processor() -> tuple[Any, str]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple(), llvm.get_host_cpu_features().flatten()


def _machine(target: Any, features: str) -> Any:
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def _compile(source: str, target: Any, features: str) -> bytes:
    module = llvm.parse_assembly(source)
    module.verify()
    machine = _machine(target, features)
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def _directory() -> Path | None:
    """Return where machine code is kept; None if that is nowhere, as for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # and so of no meaning, says the specification
        cache = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 (Path's own raises where there is no home)
    return cache / "mxq" if cache.is_absolute() else None


def _read(kept: Path) -> bytes | None:
    """Return machine code, or None if there is none that is whole and this user's."""
    try:
        # Without waiting, lest it is a pipe.
        with os.fdopen(os.open(kept, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _LARGEST:
                return None
            content = stream.read(_LARGEST)
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(kept: Path, code: bytes) -> None:
    """Write machine code down, where that can be done."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(kept, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
