"""What goes wrong between mxq and the Hugging Face hub, in words: one line of what and where, one of what to do."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from mxq.checkpoint.resolve import HubId
from mxq.errors import MxqError, UsageError, quoted
from mxq.progress import note

_TRUST = "its answers are not to be trusted: check HF_ENDPOINT and the network"
_LOGIN = "`hf auth login`, or set HF_TOKEN"


@contextlib.contextmanager
def asking(model: HubId, place: Path | None = None) -> Iterator[None]:
    """Raise what fails in the block as an MxqError about ``model``, and keep the hub's library from printing.

    Files go to ``place``, or else to the hub's cache. Not to be entered by several threads at once.
    """
    with _no_messages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except MxqError:
            raise
        except Exception as error:
            raise _explain(model, error, place) from error


def incomplete(model: HubId, missing: Iterable[str]) -> MxqError:
    """Return the error for files that the index names and neither hub nor cache has."""
    first, *others = [f"{name!r:.80}" for name in missing]
    rest = f" and {len(others)} other files" if others else ""
    return MxqError(
        f"{model} lacks {first}{rest}, which it needs",
        "unset HF_HUB_OFFLINE if it is set; else the upload is not complete, so try again later",
    )


def came_damaged(model: HubId, name: str) -> MxqError:
    """Return the error for a file that was downloaded, and removed because it is not what the hub lists."""
    return MxqError(
        f"{name} of {model} came damaged: it has another sha256 than the hub lists",
        "it was removed: run the same command again",
    )


def nonsense(what: str) -> MxqError:
    """Return the error for an answer that cannot be."""
    return MxqError(f"the hub at {_endpoint()} gives {what}", _TRUST)


def _explain(model: HubId, error: Exception, place: Path | None) -> MxqError:
    """Return what the outermost error that says anything says."""
    inner: BaseException | None = error
    seen = []
    while inner is not None and inner not in seen:
        seen.append(inner)
        if found := _known(model, inner, place):
            return found
        inner = inner.__cause__ or inner.__context__
    return MxqError(
        f"{model} could not be downloaded from the hub at {_endpoint()}: {type(error).__name__}: {_one_line(error)}",
        "check the name and the network; `hf download` shows more",
    )


def _known(model: HubId, error: BaseException, place: Path | None) -> MxqError | None:
    from huggingface_hub import constants, errors

    page = f"{_endpoint()}/{model.name}"
    match error:
        case MxqError():
            return error
        case errors.HFValidationError():
            return UsageError(
                f"{model} is no name that a model on the hub can have", "give ORG/NAME or ORG/NAME@REVISION"
            )
        case errors.GatedRepoError():
            return UsageError(
                f"{model} is gated: the hub wants its terms accepted first", f"accept them on {page}, then {_LOGIN}"
            )
        case errors.DisabledRepoError():
            return UsageError(f"{model} is disabled on the hub", f"{page} may say why")
        case errors.RevisionNotFoundError():
            return UsageError(
                f"{model.name} has no revision {model.revision or 'main'!r}", f"{page}/commits/main lists commits"
            )
        case errors.RepositoryNotFoundError():
            return _not_found(model)
        case errors.RemoteEntryNotFoundError():
            return MxqError(f"the hub at {_endpoint()} lists files of {model} that it does not have", "try again later")
        case errors.OfflineModeIsEnabled():
            revision = [] if model.revision is None else ["--revision", model.revision]
            return MxqError(
                f"{model} is not all in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids asking the hub",
                f"unset it, or run `{quoted('hf', 'download', model.name, *revision)}` where the hub can be reached",
            )
        case errors.FileMetadataError():
            return MxqError(f"what answers at {_endpoint()} is not a hub", "check HF_ENDPOINT, proxy and firewall")
        case errors.HfHubHTTPError():
            return _status(model, error.response.status_code)
        case errors.HTTPError():  # of the HTTP library: no connection, or one that broke
            return MxqError(
                f"the hub at {_endpoint()} cannot be reached, or the connection broke ({type(error).__name__})",
                "check the network and run the same command again: files that are complete are not fetched again",
            )
        case RuntimeError() if "hf_xet" in sys.modules:  # its errors have no type of their own
            return MxqError(
                f"the hub's Xet storage fails for {model}: {_one_line(error)}",
                "run the same command again, or with HF_HUB_DISABLE_XET=1",
            )
        case OSError(errno=int()) if place is not None:
            return MxqError(
                f"{model} could not be written to {place}: {error.strerror}",
                "make room or get access there, and run the same command again to continue",
            )
        case OSError(errno=int()):
            return MxqError(
                f"{model} could not be written to the hub's cache {constants.HF_HUB_CACHE}: {error.strerror}",
                "make room or get access there, or set HF_HOME to another directory",
            )
        case OSError() if "Consistency check failed" in str(error):
            return MxqError(
                f"a file of {model} came with another size than the hub says: {_one_line(error)}",
                "run the same command again",
            )
    return None


def _not_found(model: HubId) -> MxqError:
    return UsageError(
        f"{model} is neither a directory here nor a model on the hub that you may read",
        f"check the name; for a private model, {_LOGIN}",
    )


def _status(model: HubId, status: int) -> MxqError:
    if status == 401:
        return _not_found(model)
    if status == 403:
        return UsageError(f"the hub refuses {model} to you (403)", f"get access to it, then {_LOGIN}")
    if status == 429:
        return MxqError(f"the hub at {_endpoint()} takes no more requests for now (429)", f"wait a little; {_LOGIN}")
    return MxqError(f"the hub at {_endpoint()} fails for {model} (status {status})", "try again later")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _one_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "".join(character for character in line if character.isprintable())[:200]


@contextlib.contextmanager
def _no_messages() -> Iterator[None]:
    import huggingface_hub.utils.logging  # noqa: F401, which gives the logger a handler that prints

    logger = logging.getLogger("huggingface_hub")
    if os.environ.get("HF_HUB_VERBOSITY"):  # somebody wants to see them
        yield
        return
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [_Notes()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate


class _Notes(logging.Handler):
    """Of all that the hub's library logs, what explains a wait or a surprise; each once, in a line."""

    _NOTES = (
        ("Could not reach the Hub", "the hub cannot be reached; using what the cache knows of it"),
        ("Trying to resume", "the connection to the hub broke; resuming"),
        ("Retrying in", "the hub does not answer as it should; trying again"),
        ("Rate limited", "the hub asks to wait before the next request"),
    )

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Say what a message means."""
        message = record.getMessage()
        for words, meaning in self._NOTES:
            if words in message and words not in self._said and "offline mode" not in message:
                self._said.add(words)
                note(meaning)
