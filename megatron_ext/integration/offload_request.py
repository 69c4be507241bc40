"""The offload flags of a run, before anything is known of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .._input import attribute, plain, shown
from ..schedule.link import POLICIES, Link
from ..schedule.passes.offload import wanted_chunks
from .arguments import MegatronArgs
from .errors import ConfigError

MODES = ("off", "half", "full", "auto")
_FLAGS = ("--pp-offload", "--pp-offload-chunks", "--pp-offload-time", "--pp-offload-transfer")


@dataclass(frozen=True)
class OffloadRequest:
    """The offload flags of a run that offloads.

    Attributes:
        wanted: ``half``, ``full``, ``auto`` or a number of chunks, as text.
        times: one set's way to the host and back, as fractions of its chunk's F+B+W; None: to be
            measured in the first step.
        policy: a transfer policy's name; None: what measurements speak for.
        measured: the same per rank, of a former run's profile, if ``times`` does not say them.
    """

    wanted: str
    times: tuple[str, str] | None = None
    policy: str | None = None
    measured: tuple[Sequence[Fraction], Sequence[Fraction]] | None = None

    @property
    def known(self) -> bool:
        """True if nothing has to be measured in the first step to plan."""
        return self.times is not None or self.measured is not None

    @classmethod
    def of(cls, args: MegatronArgs) -> OffloadRequest | None:
        """What ``args`` ask for; None if nothing leaves the device.

        Raises:
            ConfigError: flags that contradict each other or are out of range.
        """
        mode, chunks = args.pp_offload, args.pp_offload_chunks
        if mode is not None and mode not in MODES:
            raise ConfigError(f"--pp-offload must be {', '.join(MODES)}, got {mode!r}")
        if chunks is not None and mode is not None:
            raise ConfigError(
                f"--pp-offload {mode} and --pp-offload-chunks {chunks} both say how much leaves "
                "the device; give one of them"
            )
        if chunks is None and mode in (None, "off"):
            for flag in _FLAGS[2:]:
                value = getattr(args, attribute(flag))
                if value is not None:
                    raise ConfigError(
                        f"{flag} {value} is for offloading, which is off; add --pp-offload auto "
                        f"(or half, full), or drop {flag}"
                    )
            return None
        if chunks is not None and chunks < 1:
            raise ConfigError(
                f"--pp-offload-chunks must be 1 or more, got {chunks}; drop it to offload nothing"
            )
        wanted = mode if mode is not None else str(chunks)
        policy = args.pp_offload_transfer
        if policy is not None and policy not in POLICIES:
            raise ConfigError(
                f"--pp-offload-transfer must be one of {', '.join(POLICIES)}, got {policy!r}"
            )
        return cls(wanted, _times(args.pp_offload_time), policy)

    def check_chunks(self, chunks: int) -> None:
        """Refuse more chunks than a rank has.

        Raises:
            ConfigError: there are fewer.
        """
        try:
            wanted_chunks(self.wanted, chunks)
        except ValueError:
            raise ConfigError(
                f"--pp-offload-chunks {self.wanted} is more than the {chunks} model "
                f"{'chunk' if chunks == 1 else 'chunks'} that each pipeline rank has; give 1 to "
                f"{chunks}, or add virtual stages (--num-virtual-stages-per-pipeline-rank)"
            ) from None

    def link(self, pp: int, policy: str | None = None) -> Link | None:
        """The link that the flags describe; None if its times are to be measured.

        Raises:
            ConfigError: a time is out of range.
        """
        times = self.times or self.measured
        if times is None:
            return None
        try:
            to_host, to_device = times
            return Link.of(pp, to_host, to_device, policy or self.policy or POLICIES[0])
        except ValueError as error:
            said = ",".join(map(str, self.times or ("profile",)))
            raise ConfigError(f"--pp-offload-time {plain(said)}: {error}") from None


def _times(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    parts: Sequence[str] = [part.strip() for part in text.split(",")]
    if len(parts) > 2:
        raise ConfigError(
            f"--pp-offload-time must be T or T,T2 (to the host, and back), got {shown(text)}"
        )
    times = (parts[0], parts[-1])
    OffloadRequest("auto", times).link(1)
    return times
