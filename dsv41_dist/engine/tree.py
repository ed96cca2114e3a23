"""An engine as files: an installed package, an unpacked wheel or a wheel. Read, never imported. Torch-free."""

from __future__ import annotations

import os
import re
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["PACKAGE", "UNKNOWN", "EngineNotFound", "EngineTree"]

PACKAGE = "sglang"
UNKNOWN = "unknown"
_VERSION = re.compile(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]", re.MULTILINE)
_METADATA = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)


class EngineNotFound(ValueError):
    """There is no engine where one was looked for; the text says where and what to do."""


class EngineTree:
    """Source files of one engine. `version` is as published ("0.5.23"), "unknown" when the files do not say."""

    def __init__(self, root: Path, archive: zipfile.ZipFile | None = None) -> None:
        self.root = root
        self._archive = archive
        self.version = self._find_version()

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> EngineTree:
        """A folder that holds `sglang/`, the `sglang/` folder itself, or a wheel. Raises EngineNotFound."""
        where = Path(path)
        if where.suffix == ".whl" and where.is_file():
            try:
                archive = zipfile.ZipFile(where)
            except zipfile.BadZipFile as error:
                raise EngineNotFound(f"{where} is no wheel ({error}): download it again") from error
            if f"{PACKAGE}/__init__.py" in archive.namelist():
                return cls(where, archive)
        for root in (where, where.parent) if where.name == PACKAGE else (where,):
            if (root / PACKAGE / "__init__.py").is_file():
                return cls(root)
        raise EngineNotFound(f"no {PACKAGE}/__init__.py in {where}: give the folder of an unpacked {PACKAGE} wheel")

    @classmethod
    def installed(cls) -> EngineTree:
        """The engine that `import sglang` would find here, without importing it. Raises EngineNotFound."""
        spec = PathFinder.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise EngineNotFound(f"{PACKAGE} is not installed for this interpreter: install it, or give --engine DIR")
        return cls(Path(next(iter(spec.submodule_search_locations))).parent)

    @property
    def release(self) -> str:
        """The version without a local part ("0.5.23+cu130" is release 0.5.23); fingerprints tell whether it is."""
        return self.version.partition("+")[0]

    def read(self, module: str) -> tuple[str, str] | None:
        """(path inside the tree, source text) of a module, or None when the engine has no such file."""
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            text = self._text(name)
            if text is not None:
                return name, text
        return None

    def _text(self, name: str) -> str | None:
        if self._archive is not None:
            try:
                return self._archive.read(name).decode()
            except KeyError:
                return None
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _find_version(self) -> str:
        # The file inside the package moves with the code; the metadata beside it may be of another install.
        match = _VERSION.search(self._text(f"{PACKAGE}/_version.py") or "")
        if match:
            return match[1]
        if self._archive is not None:
            names = [name for name in self._archive.namelist() if name.endswith(".dist-info/METADATA")]
            texts = [self._text(name) or "" for name in names]
        else:
            texts = [file.read_text("utf-8") for file in sorted(self.root.glob(f"{PACKAGE}-*.dist-info/METADATA"))]
        found = [match[1] for match in map(_METADATA.search, texts) if match]
        return found[0] if len(found) == 1 else UNKNOWN
