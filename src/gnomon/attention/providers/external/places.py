"""Where the libraries of others are: an installed package, or a folder of unpacked files.

In:  the folder of --provider-path (as shared/tools/fetch_anchors.sh leaves it; big files may be
     xz-compressed), the packages of this Python.
Out: files that can be loaded, loaded torch operators, imported modules, each with all that will be
     called of it.
Errors: MissingLibraryError where a library is nowhere, UnsupportedError where it is there and
     cannot be used, whatever goes wrong in it; the caller makes a Verdict's reason of them.
Compressed files are unpacked once into ~/.cache/gnomon/providers (XDG_CACHE_HOME is heeded), under
the hash of what is in them. Packages inside vLLM are loaded from its folder without importing vLLM.
Not here: what the libraries are called with (flashmla.py, deepgemm.py, fa3.py, flashinfer.py).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gnomon.errors import ConfigError, MissingLibraryError, UnsupportedError

logger = logging.getLogger(__name__)

INSIDE_VLLM = (".", "vllm_flash_attn", "third_party")
ANYTHING = (Exception, SystemExit)  # what somebody else's module may do when it is imported


class Places:
    """The folders that may hold a library, the one that the user names first."""

    def __init__(self, folder: str | None = None) -> None:
        """ConfigError if ``folder`` is given and is none."""
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(
                f"provider_path is {folder!r}: it has to be a folder that holds libraries such as "
                "_flashmla_C.abi3.so or deep_gemm"
            )

    def file(self, name: str) -> Path | None:
        """The file ``name``; unpacked into the cache if only ``name``.xz is there."""
        for folder in self._folders():
            if (folder / name).exists():
                return folder / name
            if (folder / f"{name}.xz").exists():
                return unpacked(folder / f"{name}.xz")
        return None

    def package(self, name: str) -> Path | None:
        """The folder of a Python package; out of an archive NAME-*.tar.xz if need be."""
        for folder in self._folders():
            if (folder / name / "__init__.py").exists():
                return folder / name
            for archive in sorted(folder.glob(f"{name}*.tar.xz")):
                return unpacked(archive) / name
        return None

    def operators(self, file: str, namespace: str, needed: Mapping[str, int]) -> Any | None:
        """``torch.ops.NAMESPACE`` with the operators ``needed``, after loading ``file``.

        ``needed``: name -> how many arguments it is called with, all by place: another version of
        the library may take others. None if the file is nowhere and they are not registered
        already.
        """
        found = getattr(torch.ops, namespace)
        if not lacks(found, list(needed)):
            return _taking(found, namespace, needed)
        path = self.file(file)
        if path is None:
            return None
        try:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch has no types
        except Exception as error:
            raise UnsupportedError(f"{path} cannot be loaded: {_cause(error)}") from error
        if lacking := lacks(found, list(needed)):
            raise UnsupportedError(
                f"{path} has no torch operators {namespace}.{', '.join(lacking)}; a build that has "
                "them is needed"
            )
        return _taking(found, namespace, needed)

    def has_module(self, name: str) -> bool:
        """Whether the package ``name`` is anywhere; nothing is imported."""
        if name in sys.modules or self.package(name) is not None:
            return True
        return importlib.util.find_spec(name) is not None

    def module(self, name: str, needed: Sequence[str] = ()) -> ModuleType | None:
        """The package ``name``: out of a folder if one has it, else as it is installed.

        ``needed``: what has to be in it, "mla.Wrapper". None if the package is nowhere.
        """
        try:
            found = self._imported(name)
        except ANYTHING as error:
            raise UnsupportedError(f"{name} cannot be imported: {_cause(error)}") from error
        if found is not None and (lacking := lacks(found, needed)):
            raise UnsupportedError(
                f"{name} {getattr(found, '__version__', '')} ({found.__file__}) has no "
                f"{', '.join(lacking)}; a version that has is needed"
            )
        return found

    def require_any(self, files: Sequence[str], packages: Sequence[str]) -> None:
        """ConfigError if the user names a folder that holds none of these; nothing is unpacked."""
        folder = self.folder
        if folder is None:
            return
        is_there = any((folder / f"{name}{end}").exists() for name in files for end in ("", ".xz"))
        for name in packages:
            is_there |= (folder / name / "__init__.py").exists()
            is_there |= any(folder.glob(f"{name}*.tar.xz"))
        if not is_there:
            raise ConfigError(
                f"provider_path is {str(folder)!r}: nothing is in it that gnomon can use. Allowed "
                f"are {', '.join(files)} (or with .xz), the packages {', '.join(packages)} (or "
                "NAME-*.tar.xz). Unpack one there, or leave provider_path out"
            )

    def _imported(self, name: str) -> ModuleType | None:
        if name in sys.modules:
            return sys.modules[name]
        folder = self.package(name)
        if folder is not None:
            return _imported_from(folder, name)
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
        return None

    def _folders(self) -> list[Path]:
        folders = [] if self.folder is None else [self.folder]
        vllm = importlib.util.find_spec("vllm")  # finds, does not import
        for root in () if vllm is None else vllm.submodule_search_locations or ():
            folders += [Path(root) / part for part in INSIDE_VLLM]
        return folders


def lacks(library: Any, names: Sequence[str]) -> list[str]:
    """Which of the names, "part.function" or "function", the library does not have."""

    def has(name: str) -> bool:
        held = library
        for part in name.split("."):
            held = getattr(held, part, None)
        return held is not None

    return [name for name in names if not has(name)]


def _taking(operators: Any, namespace: str, needed: Mapping[str, int]) -> Any:
    """The operators; UnsupportedError if one cannot be called with so many arguments by place."""
    for name, count in needed.items():
        operator = getattr(operators, name)
        schemas = [getattr(operator, overload)._schema for overload in operator.overloads()]
        if not any(_takes(schema.arguments, count) for schema in schemas):
            raise UnsupportedError(
                f"this build's {namespace}.{name} takes other arguments ({schemas[0]}) than the "
                f"{count} of vLLM 0.25.1's, which the adapter gives; install that version's"
            )
    return operators


def _takes(arguments: Sequence[Any], count: int) -> bool:
    by_place = [one for one in arguments if not one.kwarg_only]
    rest = [*by_place[count:], *(one for one in arguments if one.kwarg_only)]
    return count <= len(by_place) and all(one.has_default_value() for one in rest)


def missing(package: str, url: str, file: str) -> MissingLibraryError:
    """What to say where a library is not here."""
    return MissingLibraryError(
        f"not installed; pip install git+{url} (import name {package}), or --provider-path DIR "
        f"with {file}"
    )


def cuda_home(candidates: Sequence[str | None] | None = None) -> Path | None:
    """The CUDA toolkit whose bin/nvcc exists: CUDA_HOME, CUDA_PATH, nvcc in PATH, /usr/local."""
    if candidates is None:
        nvcc = shutil.which("nvcc")
        candidates = (
            os.environ.get("CUDA_HOME"),
            os.environ.get("CUDA_PATH"),
            None if nvcc is None else str(Path(nvcc).resolve().parent.parent),
            "/usr/local/cuda",
        )
    for candidate in candidates:
        if candidate and (Path(candidate) / "bin" / "nvcc").exists():
            return Path(candidate)
    return None


def unpacked(archive: Path) -> Path:
    """The file in an .xz, or the folder in a .tar.xz, unpacked once and then reused."""
    data = archive.read_bytes()
    home = _cache_folder() / hashlib.sha256(data).hexdigest()[:24]
    is_tar = archive.name.endswith(".tar.xz")
    target = home if is_tar else home / archive.name.removesuffix(".xz")
    if target.exists():
        return target
    home.parent.mkdir(parents=True, exist_ok=True)
    logger.info("unpacking %s into %s", archive, home)
    try:
        with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
            fresh = Path(scratch) / "fresh"
            fresh.mkdir()
            if is_tar:
                with tarfile.open(archive, "r:xz") as packed:
                    packed.extractall(fresh, filter="data")
            else:
                with lzma.open(archive) as packed_file, (fresh / target.name).open("wb") as out:
                    shutil.copyfileobj(packed_file, out, 1 << 20)
            try:
                fresh.rename(home)
            except OSError:  # another process was faster
                if not target.exists():
                    raise
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise UnsupportedError(f"{archive} cannot be unpacked: {error}") from error
    return target


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gnomon" / "providers"


def _imported_from(folder: Path, name: str) -> ModuleType:
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{init} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _cause(error: BaseException) -> str:
    """The first line of what went wrong at the root."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
