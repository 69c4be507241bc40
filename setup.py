"""Thin on purpose: everything is in pyproject.toml but what setuptools has no setting for."""

import gzip
import os
import tarfile
import zipfile
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist


class PlainWheel(bdist_wheel):
    """A wheel keeps each file's mode, which depends on the umask of who made it: all are 0644 here.

    Times in it are SOURCE_DATE_EPOCH, if that is set, by setuptools itself.
    """

    def run(self):
        """Build as always, then write the modes anew."""
        super().run()
        for _, _, path in self.distribution.dist_files:
            with zipfile.ZipFile(path) as wheel:
                entries = [(entry, wheel.read(entry)) for entry in wheel.infolist()]
            with zipfile.ZipFile(path, "w") as wheel:
                for entry, data in entries:
                    entry.external_attr = 0o100644 << 16
                    wheel.writestr(entry, data)


class ReproducibleSdist(sdist):
    """With SOURCE_DATE_EPOCH set, the same files give the same archive, byte for byte.

    setuptools does so for wheels, but writes the time, the user and each file's own time here.
    """

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **options):
        """As setuptools, or with everything in it that depends on the machine taken out."""
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, **options)

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.mtime, entry.uid, entry.gid = int(epoch), 0, 0
            entry.uname = entry.gname = ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        target = f"{base_name}.tar.gz"
        with (
            open(target, "wb") as file,
            gzip.GzipFile("", "wb", mtime=int(epoch), fileobj=file) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            folder = Path(root_dir or ".")
            for path in sorted([folder / base_dir, *(folder / base_dir).rglob("*")]):
                name = str(path.relative_to(folder))
                archive.add(path, name, recursive=False, filter=plain)
        return target


def patches() -> list[tuple[str, list[str]]]:
    """The patches for plain git, which a wheel installs under ``share/megatron-ext/patches``.

    `megatron-ext patch` needs none of them; they are for people who read or apply patches.
    """
    folders = sorted(path for path in Path("patches").iterdir() if path.is_dir())
    return [
        (f"share/megatron-ext/{folder.as_posix()}", sorted(map(str, folder.glob("*.patch"))))
        for folder in folders
    ]


setup(
    data_files=patches(),
    cmdclass={
        "bdist_wheel": PlainWheel,
        "sdist": ReproducibleSdist,
    },
)
