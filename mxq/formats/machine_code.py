"""Machine code for this processor, made by LLVM and kept in the user's cache directory.

numba does that too, and takes a second of every process to import itself and to look at what it kept: as long as it
takes to quantize gigabytes. LLVM by itself is there in a twentieth of a second.
"""

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from mxq.files import atomic_write

_DIGEST = 32
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
        kept = _directory() / f"{hashlib.sha256(repr((made_of, made_for)).encode()).hexdigest()[:32]}.o"
        code = _read(kept)
        if code is None:
            code = _compile(source(name), target, features)
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


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "mxq"


def _read(kept: Path) -> bytes | None:
    """Return machine code, or None if there is none that is whole."""
    try:
        digest, code = (content := kept.read_bytes())[:_DIGEST], content[_DIGEST:]
    except OSError:
        return None
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(kept: Path, code: bytes) -> None:
    """Write machine code down, where that can be done."""
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(kept, "wb") as stream:
            stream.write(hashlib.sha256(code).digest() + code)
