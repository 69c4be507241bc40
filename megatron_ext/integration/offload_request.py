"""The offload flags of a run, before anything is known of the machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from .._input import plain
from ..schedule.link import Link
from ..schedule.passes.offload import wanted_chunks
from ..schedule.placement import Placement
from .arguments import MegatronArgs
from .errors import ConfigError, named_errors


@dataclass(frozen=True)
class OffloadRequest:
    """The offload flags of a run that offloads.

    Attributes:
        wanted: ``half``, ``full``, ``auto`` or a number of chunks, as text.
        times: of ``--pp-offload-time``, as ``Link.parse`` takes them; None: to be measured in the
            first step.
    """

    wanted: str
    times: str | None = None

    @property
    def known(self) -> bool:
        """True if nothing has to be measured in the first step to plan."""
        return self.times is not None

    @classmethod
    def of(cls, args: MegatronArgs) -> OffloadRequest | None:
        """What ``args`` ask for; None if nothing leaves the device.

        Raises:
            ConfigError: a time that is none.
        """
        mode, chunks = args.pp_offload, args.pp_offload_chunks
        if chunks is None and mode in (None, "off"):
            return None
        wanted = mode if mode is not None else str(chunks)
        request = cls(wanted, args.pp_offload_time)
        request.link(1)  # refuses what is no time
        return request

    def check(self, placement: Placement) -> None:
        """Refuse more chunks than a rank has, and times that are not one, one a rank, or one a
        stage.

        Raises:
            ConfigError: one of them.
        """
        chunks = placement.chunks
        try:
            wanted_chunks(self.wanted, chunks)
        except ValueError:
            raise ConfigError(
                f"{self.wanted} chunks cannot be offloaded, since a rank has {chunks}; give 1 to "
                f"{chunks}"
            ) from None
        link = self.link(placement.pp)
        if link is not None:
            with self._named():
                link.check(placement)

    def link(self, pp: int) -> Link | None:
        """The link that the flags describe; None if its times are to be measured.

        Raises:
            ConfigError: a time is out of range.
        """
        if self.times is None:
            return None
        with self._named():
            return Link.parse(pp, self.times)

    def _named(self) -> AbstractContextManager[None]:
        return named_errors(f"--pp-offload-time {plain(self.times or '')}")
