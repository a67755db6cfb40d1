"""Fetches the packages that hold the texts, by name through the ordinary clients; unpacks them, installs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


class Packages:
    """A folder of unpacked packages; one that is already there is not fetched again."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()

    def deb(self, name: str) -> Path:
        return self._unpacked("deb", name, ["apt-get", "download", "-q", name], "*.deb", self._open_deb)

    def pip(self, spec: str) -> Path:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", spec]
        return self._unpacked("pip", re.split("[=<>]", spec)[0], command, "*.whl", self._open_zip)

    def npm(self, spec: str) -> Path:
        return self._unpacked("npm", spec.split("@")[0], ["npm", "pack", "--silent", spec], "*.tgz", self._open_tar)

    def _unpacked(self, kind: str, name: str, command: list[str], pattern: str, unpack) -> Path:
        target = self.folder / kind / name
        if target.is_dir():
            return target
        download = target.with_name(name + ".dl")
        download.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=download, check=True, stdout=subprocess.DEVNULL)
        unpack(sorted(download.glob(pattern))[-1], target)
        return target

    @staticmethod
    def _open_deb(archive: Path, target: Path) -> None:
        subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)

    @staticmethod
    def _open_zip(archive: Path, target: Path) -> None:
        zipfile.ZipFile(archive).extractall(target)

    @staticmethod
    def _open_tar(archive: Path, target: Path) -> None:
        with tarfile.open(archive) as tar:
            tar.extractall(target, filter="data")
