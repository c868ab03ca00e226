"""What ``mxq doctor`` finds: in an environment, by the rules of the catalogue; in a server's log, by what it used."""

from mxq.checkpoint.reader import read_config
from mxq.checkpoint.resolve import hub_id, open_headers, resolve
from mxq.engines.vllm_log import LogFacts
from mxq.hardware.catalogue import RULES
from mxq.hardware.environment import Environment
from mxq.hardware.model import ModelFacts, facts_of
from mxq.hardware.rules import Finding, Severity, judge

_LOG = ("mxq/engines/vllm_log.py",)


def examine(environment: Environment) -> list[Finding]:
    """Return what the rules find in an environment, the worst first."""
    return judge(environment, RULES)


def look_at(model: str) -> ModelFacts:
    """Return what rules need of a model, of which only config.json is looked at.

    Raises:
        UsageError, MxqError: there is no such model, or it is none that mxq reads.
    """
    if hub_id(model) is not None:
        checkpoint = open_headers(model)
        return facts_of(model, checkpoint.config, str(checkpoint.path))
    path = resolve(model)
    return facts_of(model, read_config(path), str(path))


def examine_log(facts: LogFacts) -> list[Finding]:
    """Return what is wrong in what a server's log says, the worst first."""
    found = [*_kernels(facts), *_drafter(facts), *_start(facts), *_caching(facts), *_remarks(facts)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def _kernels(facts: LogFacts) -> list[Finding]:
    if not facts.emulated:
        return []
    names = [
        name for name in (*facts.linear_kernels, *facts.moe_backends, *facts.moe_experts) if "emulation" in name.lower()
    ]
    what = ", ".join(names) or next(iter(facts.emulation), "simulated, and no kernel is named")
    return [
        Finding(
            "log-emulated",
            Severity.ERROR,
            f"MXFP4 is emulated ({what}): weights are dequantized in every step, slower than bf16",
            "run mxq doctor where the server runs: it says what keeps native kernels from being used",
            _LOG,
        )
    ]


def _drafter(facts: LogFacts) -> list[Finding]:
    if facts.drafter_loaded is not False:
        return []
    if facts.method is None:
        what = "the command asked for speculative decoding, and the engine's config has none"
    else:
        what = f"{facts.method} was asked for, and its drafter ({facts.drafter}) was not loaded"
    return [
        Finding(
            "log-drafter-not-loaded",
            Severity.ERROR,
            what,
            "see the errors of the log; measure no speculative decoding with this server",
            _LOG,
        )
    ]


def _start(facts: LogFacts) -> list[Finding]:
    first = next(iter(facts.failures), "which one is not in the log")
    do = f"see line {facts.failure_line} of the log and those before it" if facts.failures else "see the log"
    if facts.died:
        text = f"the engine ended with an error: {first}"
        return [Finding("log-engine-died", Severity.ERROR, text, do, _LOG)]
    if facts.ready:
        return []
    if facts.failures:
        text = f"the server did not start: {first}"
        return [Finding("log-not-started", Severity.ERROR, text, do, _LOG)]
    text = "the log ends before the server takes requests: what it used may not be in it yet"
    return [Finding("log-unfinished", Severity.WARNING, text, "read it again later, or get the whole log", _LOG)]


def _caching(facts: LogFacts) -> list[Finding]:
    if not facts.prefix_caching or facts.method is None:
        return []
    text = "prefix caching is on beside speculative decoding, which has been reported to spoil answers"
    do = "start the server with --no-enable-prefix-caching"
    return [Finding("log-prefix-caching", Severity.WARNING, text, do, ("vllm-project/vllm#53912",))]


def _remarks(facts: LogFacts) -> list[Finding]:
    return [
        Finding("log-remark", Severity.WARNING, f"vLLM warns: {text}", "judge whether you meant that", _LOG)
        for text in facts.remarks
    ]
