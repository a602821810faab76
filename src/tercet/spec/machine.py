"""Machine: cards, their links, host memory. Numbers come from gpus.toml (each with a source) or from `doctor`.

What is not known is None here and "unknown" to the user; nothing is guessed from a similar card.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Any

import orjson

from tercet.errors import InputError, nearest
from tercet.places import config_folder
from tercet.spec.cards import CardFields, all_cards, bytes_of, detect_gpus
from tercet.spec.described import Host, parse_host, parse_watts
from tercet.spec.memory_limit import memory_limit
from tercet.units import parse_bytes

GIB = 2**30

# GeForce rates are quoted at the guaranteed boost clock; cards with room in power and heat hold up to a ninth more
# (RTX 4090: quoted at 2.52 GHz, 2.7 to 2.8 in use).
BOOST = 2.8 / 2.52

# PyTorch sees 98.0 % (RTX 5090) to 98.9 % (H100) of a card's nominal memory: the driver keeps the rest. The
# five cards with a reported figure stand in gpus.toml as usable_gib; the others take the lowest share of those.
USABLE_SHARE = 0.980

# Bytes per second that one direction of a slot reaches with pinned memory, per lane, by PCIe generation:
# 24 GB/s over 16 lanes of generation 4 and 13 over 8 are measured (NCCL's own constant says 24 too); the
# others scale with the transfer rate of the generation.
LEAST_POWER = 1 / 3  # of a card's own limit
LANE_BYTES_PER_S = {3: 0.75e9, 4: 1.5e9, 5: 3.0e9}


MOST_CARDS = 1024
FEWEST_HOST_BYTES = 2**28  # less is a slip: a number without its unit, or a negative one


@dataclass(frozen=True)
class Gpu:
    """One card. `flops` holds dense FLOP/s by number format; a format the card lacks is absent."""

    name: str
    arch: str
    compute_capability: float | None
    memory_bytes: int
    usable_bytes: int
    bandwidth: float
    flops: dict[str, float] = field(hash=False)
    reached: float | None
    watts: float | None
    pcie_generation: int | None
    pcie_lanes: int | None
    peer_access: bool
    nvlink: float | None  # bytes per second, both directions together
    rent_usd_per_hour: tuple[float, float] | None
    note: str = ""

    @property
    def geforce(self) -> bool:
        """Whether it is a consumer card: these run above the clock that their rates are quoted at."""
        return re.match(r"RTX [2-5]0[5-9]0\b", self.name) is not None

    @property
    def sustained(self) -> float:
        """Arithmetic that no kernel exceeds, as a share of the quoted rates."""
        return BOOST if self.geforce else 1.0

    @property
    def plain_flops(self) -> float:
        """FLOP/s of plain matmuls: bf16, or fp16 on cards that lack it."""
        return self.flops.get("bf16") or self.flops["fp16"]

    def limited(self, watts: float) -> Gpu:
        """Return the card under a power limit. Raises InputError for one that drivers do not allow.

        Power rises with clock times voltage squared and voltage with the clock, so the clock follows power's cube
        root; memory keeps its own clock.
        """
        if self.watts is None or watts >= self.watts:
            return self
        if watts < LEAST_POWER * self.watts:
            raise InputError(
                f"--power-limit: {watts:g} W is below a third of the {self.name}'s {self.watts:g} W",
                f"Drivers allow no less: --power-limit {ceil(LEAST_POWER * self.watts)}W",
            )
        slower = (watts / self.watts) ** (1 / 3)
        return replace(self, watts=watts, flops={kind: rate * slower for kind, rate in self.flops.items()})

    @property
    def host_link(self) -> float | None:
        """Bytes per second between card and host, one direction, pinned memory."""
        return link_bytes_per_s(self.pcie_generation, self.pcie_lanes)


def link_bytes_per_s(generation: int | None, lanes: int | None) -> float | None:
    if generation is None or lanes is None or generation not in LANE_BYTES_PER_S:
        return None
    return LANE_BYTES_PER_S[generation] * lanes


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((resources.files("tercet.spec") / "gpus.toml").read_text(encoding="utf-8"))


@cache
def gpus() -> dict[str, Gpu]:
    """Return name -> card of everything in gpus.toml."""
    return {name: _gpu(name, block) for name, block in _table().items() if name != "sources"}


def _gpu(name: str, block: dict[str, Any]) -> Gpu:
    def number(key: str) -> Any:
        return block[key][0] if key in block else None

    memory = number("memory_gib") * GIB
    usable = number("usable_gib")
    rent = block.get("rent_usd_per_hour")
    nvlink = number("nvlink_gbps")
    formats = ("bf16", "fp16", "fp16_fast", "fp8", "int8")
    return Gpu(
        name=name,
        arch=block["arch"],
        compute_capability=number("compute_capability"),
        memory_bytes=memory,
        usable_bytes=int(usable * GIB if usable else memory * USABLE_SHARE),
        bandwidth=number("bandwidth_gbps") * 1e9,
        flops={f: number(f) * 1e12 for f in formats if f in block},
        reached=number("reached"),
        watts=number("watts"),
        pcie_generation=number("pcie_generation"),
        pcie_lanes=number("pcie_lanes"),
        peer_access=bool(number("peer_access")),
        nvlink=nvlink * 1e9 if nvlink else None,
        rent_usd_per_hour=(rent[0], rent[1]) if rent else None,
        note=block.get("note", ""),
    )


def _words(name: str) -> set[str]:
    text = re.sub(r"nvidia|geforce|tesla|amd|instinct|\(r\)|\(tm\)", " ", name.lower())
    text = re.sub(r"(\d+)\s*(?:gb|gib)\b", r"\1gb", text).replace("pci-e", "pcie").replace("-", " ")
    text = re.sub(r"sxm\d|hbm3\b", "sxm", text)  # drivers say "A100-SXM4-80GB" and "H100 80GB HBM3"
    return set(re.findall(r"[a-z0-9]+", text)) - {"gpu", "generation", "edition", "workstation"}


def find_gpu(name: str) -> Gpu:
    """Return a card by name: "RTX 4090", "4090", "a100 sxm 80gb", "NVIDIA GeForce RTX 4090".

    Raises InputError with the nearest names for an unknown card, or with the candidates for an ambiguous one.
    """
    wanted = _words(name)
    joined = "".join(re.findall(r"[a-z0-9]+", name.lower()))
    for card in gpus().values():
        if card.name.lower() == name.strip().lower():
            return card
    fits = [c for c in gpus().values() if wanted and wanted <= _words(c.name)]
    if not fits:  # rtx4090, a100-80gb: words run together, or part of them
        fits = [
            c
            for c in gpus().values()
            if joined == "".join(re.findall(r"[a-z0-9]+", c.name.lower()))
            or joined.removeprefix("rtx") == "".join(sorted(_words(c.name) - {"rtx"}, key=c.name.lower().find))
        ]
    if len(fits) > 1:
        # "4090" means the card of exactly that name, not a variant with more words; words like RTX do not count.
        least = min(len(_words(c.name) - wanted - {"rtx"}) for c in fits)
        closest = [c for c in fits if len(_words(c.name) - wanted - {"rtx"}) == least]
        if len(closest) == 1 and least == 0:
            return closest[0]
        raise InputError(f"{name!r} may be {', '.join(c.name for c in fits)}", "Write the name of one of them.")
    if fits:
        return fits[0]
    for own, block in (read_machine_file() or {}).get("cards", {}).items():  # measured here by doctor
        if wanted and wanted <= _words(own):
            return _gpu(own, block)
    short = {re.sub(r"^RTX ", "", n): n for n in gpus()}
    hint = nearest(name, [*gpus(), *short])
    raise InputError(
        f"no data for a card {name!r}{hint}",
        f"Known: {', '.join(gpus())}. Another card: run `tercet doctor` on the machine that has it.",
    )


@dataclass(frozen=True)
class Machine:
    """`ranks` equal workers: cards, or processes on the CPU when `card` is None.

    host_bytes None means unknown: shown as a need, never refused. `measured` holds what `tercet doctor` found
    (see probe), in bytes and FLOP per second, under the names of `MEASURED`.
    """

    ranks: int
    card: Gpu | None
    lanes: tuple[int, ...] | None = None
    host_bytes: int | None = None
    host_limit: str | None = None  # who allows no more than host_bytes, when that is less than the machine has
    peer_access: bool | None = None
    measured: dict[str, float] = field(default_factory=dict, hash=False)
    measured_at: str | None = None
    corrections: dict[str, float] = field(default_factory=dict, hash=False)  # the planner's constants, by its own runs
    name: str = ""
    notes: tuple[str, ...] = ()  # what a user should know of these very cards
    cards: tuple[Gpu, ...] = ()  # each by itself, where they differ; `card` is what an equal part may count on
    host: Host | None = None  # as a user describes it
    disk_bytes: int | None = None  # free for checkpoints and files; None: unknown

    @property
    def kind(self) -> str:
        return "cpu" if self.card is None else "gpu"

    @property
    def worker_bytes(self) -> int | None:
        """Memory that one rank may fill: the card's usable part, or an equal part of the host's."""
        if self.card is not None:
            return self.card.usable_bytes
        return None if self.host_bytes is None else self.host_bytes // self.ranks

    @property
    def nvlink(self) -> bool:
        # The bridge of GeForce and workstation cards joins two; only data-centre boards join all.
        return (
            self.card is not None
            and self.card.nvlink is not None
            and ((self.ranks <= 2 and self.card.nvlink < 200e9) or self.card.nvlink >= 200e9)
        )

    @property
    def peers(self) -> bool:
        """Whether cards reach each other's memory without passing through the host's."""
        if self.card is None:
            return False
        return self.card.peer_access if self.peer_access is None else self.peer_access

    def host_links(self) -> tuple[float | None, ...]:
        """Return each card's bytes per second to the host."""
        if self.card is None:
            return (None,) * self.ranks
        if "host_to_card" in self.measured:
            return (self.measured["host_to_card"],) * self.ranks
        lanes = self.lanes or (self.card.pcie_lanes,) * self.ranks
        return tuple(link_bytes_per_s(self.card.pcie_generation, n) for n in lanes)

    def known(self, rate: str, otherwise: float) -> float:
        """Return a rate of the host or its drive: measured, else of the host as described, else `otherwise`."""
        described = self.host.rates() if self.host is not None else {}
        return self.measured.get(rate, described.get(rate, otherwise))

    def leaving(self, share: float) -> Machine:
        """Return the machine with that share of each card's usable memory left free."""
        if self.card is None or not share:
            return self
        return replace(self, card=replace(self.card, usable_bytes=int(self.card.usable_bytes * (1 - share))))

    def with_ranks(self, ranks: int) -> Machine:
        return self._with_cards(range(min(ranks, self.ranks)), ranks)

    def widest(self, ranks: int) -> Machine:
        """Return the machine with only that many of its cards: the fastest, those in the widest slots."""
        lanes = self.lanes or (0,) * self.ranks
        speeds = [c.plain_flops for c in self.cards] or [0.0] * self.ranks
        order = sorted(range(self.ranks), key=lambda n: (-speeds[n], -lanes[n]))
        return self._with_cards(order[:ranks], ranks)

    def _with_cards(self, numbers: Sequence[int], ranks: int) -> Machine:
        lanes = tuple(self.lanes[n] for n in numbers) if self.lanes else None
        cards = tuple(self.cards[n] for n in numbers) if self.cards else ()
        return replace(self, ranks=ranks, lanes=lanes, cards=cards, card=weakest(cards) if cards else self.card)

    def describe(self) -> str:
        if self.card is None:
            return f"{self.ranks} CPU process{'es' if self.ranks > 1 else ''}"
        return f"{self.ranks}x {self.card.name}"


# What the machine file may hold, in bytes/s, FLOP/s or parameters/s.
MEASURED = (
    "matmul_fp32",
    "matmul_bf16",
    "matmul_fp16",
    "matmul_fp16_fast",
    "matmul_fp8",
    "memory",
    "host_to_card",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "collective_latency",
    "cpu_adam",
    "disk_write",
    "process",  # bytes that a rank on the CPU holds without a model
)


OVER_LINKS = frozenset(("host_to_card", "all_reduce", "all_gather", "reduce_scatter", "collective_latency"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read "3x4090", "2 x RTX 3090", "4090" (one), "2x4090,3060" (they differ) into cards. Raises InputError."""
    found = [card for part in re.split(r"[,+]", text) for card in _parse_same(part)]
    if len(found) > MOST_CARDS:
        raise InputError(f"--gpus {text!r}: the number of cards must be from 1 to {MOST_CARDS}")
    return tuple(found)


def _parse_same(text: str) -> list[Gpu]:
    match = re.match(r"^\s*(?:(-?[\d.]+)\s*[x×*]\s*)?(\S.*?)\s*$", text)
    if not match:
        raise InputError(f"--gpus {text!r} names no card", "For example: --gpus 3x4090")
    if not re.fullmatch(r"\d+", match[1] or "1"):
        raise InputError(f"--gpus {text!r}: {match[1]} is no number of cards", "For example: --gpus 3x4090")
    count = int(match[1] or 1)
    turned = re.match(r"^\s*(\S.*?)\s*[x×*]\s*(\d+)\s*$", text)
    try:
        if not 1 <= count <= MOST_CARDS:
            raise InputError(f"--gpus {text!r}: the number of cards must be from 1 to {MOST_CARDS}")
        return [find_gpu(match[2])] * count
    except InputError as error:
        if turned and _is_card(turned[1]):
            raise InputError(error.message, f"The number comes first: --gpus {turned[2]}x{turned[1]}") from None
        raise


def _is_card(name: str) -> bool:
    try:
        return bool(find_gpu(name))
    except InputError:
        return False


def parse_links(text: str, count: int) -> tuple[int, ...]:
    """Read "x16,x8,x4" (one for all, or one per card) into lanes per card. Raises InputError."""
    lanes = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*[x×]?(\d+)\s*", part.lower())
        if not match or int(match[1]) not in (1, 2, 4, 8, 16):
            raise InputError(f"--links {text!r}: {part.strip()!r} is not x1, x2, x4, x8 or x16")
        lanes.append(int(match[1]))
    if len(lanes) == 1:
        lanes *= count
    if len(lanes) != count:
        raise InputError(f"--links {text!r} names {len(lanes)} cards, --gpus names {count}")
    return tuple(lanes)


def machine_of(
    gpus: str | None = None,
    host_ram: str | int | None = None,
    links: str | None = None,
    ranks: int | None = None,
    *,
    host: str | None = None,
    power_limit: str | None = None,
    p2p: bool | None = None,
    disk: str | int | None = None,
) -> Machine:
    """Return the machine that the user describes, or this one when `gpus` is None.

    Raises InputError for an unknown card, for links that do not match, and for a size that is no size.
    """
    found = _machine(gpus, _size(host_ram, "--host-ram", "128GB"), links, ranks)
    if power_limit is not None:
        found = _power_limited(found, parse_watts(power_limit))
    if p2p is not None:
        if found.card is None:
            raise InputError("--p2p describes cards, and this machine has none", "Name them: --gpus 3x4090")
        same = p2p == found.peers
        kept = found.measured if same else {k: v for k, v in found.measured.items() if k not in OVER_LINKS}
        found = replace(found, peer_access=p2p, measured=kept)
    if host is not None:
        described = parse_host(host)
        kept = {k: v for k, v in found.measured.items() if k not in described.rates()}
        found = replace(found, host=described, measured=kept)
    return replace(found, disk_bytes=_size(disk, "--disk", "1TB")) if disk is not None else found


def _size(text: str | int | None, option: str, example: str) -> int | None:
    try:
        size = parse_bytes(text) if isinstance(text, str) else text
        if size is not None and size < FEWEST_HOST_BYTES:
            raise ValueError(f"{text!r} is {size} bytes, less than any machine has; a unit may be missing")
    except ValueError as error:
        raise InputError(f"{option}: {error}", f"For example: {option} {example}") from None
    return size


def _power_limited(machine: Machine, watts: float) -> Machine:
    if machine.card is None:
        raise InputError("--power-limit describes cards, and this machine has none", "Name them: --gpus 3x4090")
    card = machine.card.limited(watts)
    slower = card.plain_flops / machine.card.plain_flops
    measured = {k: v * slower if k.startswith("matmul") else v for k, v in machine.measured.items()}
    return replace(machine, card=card, cards=tuple(c.limited(watts) for c in machine.cards), measured=measured)


def _machine(gpus: str | None, host: int | None, links: str | None, ranks: int | None) -> Machine:
    if gpus is None:
        found = this_machine(ranks)
        if links is not None:
            if found.card is None:
                raise InputError("--links describes cards, and this machine has none", "Name them: --gpus 3x4090")
            # Other links than this machine's: what was measured over its own says nothing about them.
            kept = {k: v for k, v in found.measured.items() if k not in OVER_LINKS}
            found = replace(found, lanes=parse_links(links, found.ranks), measured=kept)
        return replace(found, host_bytes=host, host_limit=None) if host is not None else found
    cards = parse_gpus(gpus)
    count, card = len(cards), weakest(cards)
    if ranks is not None and ranks > count:
        raise InputError(f"--ranks {ranks} exceeds the {count} cards of --gpus {gpus}")
    lanes = parse_links(links, count) if links else None
    machine = Machine(ranks=count, card=card, lanes=lanes, host_bytes=host, name=f"{count}x {card.name}")
    if len(set(cards)) > 1:
        machine = replace(machine, cards=cards, notes=(differ(cards),))
    return machine.with_ranks(ranks) if ranks else machine


def machine_file() -> Path | None:
    """Return where `tercet doctor` writes what it measured; None for a user without a folder of their own."""
    folder = config_folder()
    return None if folder is None else folder / "machine.json"


def read_machine_file(path: Path | None = None) -> dict[str, Any] | None:
    """Return the machine file's content, or None when there is none. Raises InputError when it is broken."""
    path = path or machine_file()
    if path is None:
        return None
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, orjson.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", "Delete it, or run `tercet doctor` again.") from None


DEFAULT_CPU_RANKS = 3  # as many as the cards that this project is about


def this_machine(ranks: int | None = None) -> Machine:
    """Return the machine we are on: the cards that may be used here, else processes on the CPU.

    Raises InputError for a card of which nothing is known.
    """
    import psutil

    memory = psutil.virtual_memory().total
    limit = memory_limit(ranks or DEFAULT_CPU_RANKS)
    host_limit = None
    if limit is not None and limit.bytes < memory:  # the smaller limit rules
        memory, host_limit = limit.bytes, limit.source
    content = read_machine_file() or {}
    measured = {k: float(v) for k, v in content.get("measured", {}).items() if k in MEASURED}
    at = content.get("measured_at")
    cards = detect_gpus()
    learnt = content.get("corrections", {})  # by runs on the cards, or on the CPU: one says nothing of the other
    same = learnt.get("kind") == ("gpu" if cards else "cpu")
    corrections = {k: float(v) for k, v in learnt.get("constants", {}).items()} if same else {}
    if not cards:
        return Machine(
            ranks=ranks or DEFAULT_CPU_RANKS,
            card=None,
            host_bytes=memory,
            host_limit=host_limit,
            name="this machine (CPU)",
            measured=measured if content.get("kind") == "cpu" else {},
            measured_at=at,
            corrections=corrections,
            notes=_hidden(),
        )
    count = min(ranks or len(cards), len(cards))
    used = cards[:count]
    lanes = tuple(int(c["pcie.link.width.current"]) for c in used if c["pcie.link.width.current"].isdigit())
    each = [card_here(row, content.get("cards", {})) for row in used]
    return Machine(
        ranks=count,
        card=weakest(each),
        cards=tuple(each) if len(set(each)) > 1 else (),
        lanes=lanes if len(lanes) == len(used) else None,
        host_bytes=memory,
        host_limit=host_limit,
        peer_access=content.get("peer_access"),
        measured=measured if content.get("kind") == "gpu" else {},
        measured_at=at,
        corrections=corrections,
        name="this machine",
        notes=notes_of(used, each),
    )


def _hidden() -> tuple[str, ...]:
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    here = len(all_cards()) if wanted is not None else 0
    return (f"CUDA_VISIBLE_DEVICES is {wanted!r}: the CPU is used, not the {here} cards that are here",) if here else ()


def card_here(row: CardFields, measured: dict[str, Any]) -> Gpu:
    """Return one card of this machine: rates of its kind, its own memory, less what others hold of it.

    `measured` holds the entries that doctor has written, by name. Raises InputError for a card of no known rates.
    """
    total, held = bytes_of(row, "memory.total"), _held_by_others(row)
    if row["name"] in measured:
        card = _gpu(row["name"], measured[row["name"]])
    else:
        card = _of_this_kind(row["name"], total)
    if (watts := _number(row.get("power.limit"))) is not None and card.watts:
        card = card.limited(max(watts, LEAST_POWER * card.watts))
    if total is None:
        return replace(card, usable_bytes=max(0, card.usable_bytes - held))
    share = card.usable_bytes / card.memory_bytes  # of its kind, as PyTorch has seen it
    return replace(card, memory_bytes=total, usable_bytes=max(0, int(total * share) - held))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # "[N/A]"
        return None


def _of_this_kind(name: str, total: int | None) -> Gpu:
    """Return the table's card of a driver's name: words of size and board may be missing, none of the kind.

    Several sizes of one kind are told apart by the memory that is there.
    """
    wanted = _words(name)
    fits = [c for c in gpus().values() if wanted <= _words(c.name) and not _kind(_words(c.name) - wanted)]
    if not fits:
        raise InputError(
            f"no data for this machine's card {name!r}",
            "Run `tercet doctor` here: it measures the card and writes what plan and train need.",
        )
    return min(fits, key=lambda c: abs(c.memory_bytes - (total or 0)))


def _kind(words: set[str]) -> set[str]:
    return {w for w in words if not re.fullmatch(r"\d+gb|modified|sxm|pcie", w)}


def _held_by_others(row: CardFields) -> int:
    # Under somebody else's launcher the ranks are on their cards already, and what is held is their own.
    return 0 if "RANK" in os.environ else bytes_of(row, "memory.used") or 0


def weakest(cards: Sequence[Gpu]) -> Gpu:
    """Return what an equal part of the work may count on: of different cards the least of each."""
    slowest = min(cards, key=lambda c: c.plain_flops)
    if len({c.name for c in cards}) == 1:
        return replace(slowest, usable_bytes=min(c.usable_bytes for c in cards))
    shared = set.intersection(*(set(c.flops) for c in cards))
    return replace(
        slowest,
        name=" + ".join(dict.fromkeys(c.name for c in cards)),
        memory_bytes=min(c.memory_bytes for c in cards),
        usable_bytes=min(c.usable_bytes for c in cards),
        bandwidth=min(c.bandwidth for c in cards),
        flops={f: min(c.flops[f] for c in cards) for f in shared},
        compute_capability=min((c.compute_capability or 0) for c in cards) or None,
        peer_access=all(c.peer_access for c in cards),
        nvlink=None,
        rent_usd_per_hour=None,
    )


WORTH_SAYING_BYTES = 64 * 2**20  # below, it is what the driver itself keeps on an idle card


def notes_of(rows: Sequence[CardFields], cards: Sequence[Gpu]) -> tuple[str, ...]:
    """Return a sentence for each card whose memory others hold, and for cards or sizes that differ."""
    found = []
    for row, card in zip(rows, cards, strict=True):
        if (held := _held_by_others(row)) >= WORTH_SAYING_BYTES:
            found.append(
                f"card {row['index']} ({card.name}): others hold {held / GIB:.1f} of its {card.memory_bytes / GIB:.1f} "
                f"GiB (nvidia-smi names them); {card.usable_bytes / GIB:.1f} GiB are planned with"
            )
    if len({(c.name, round(c.memory_bytes / GIB)) for c in cards}) > 1:
        found.append(differ(cards, [row["index"] for row in rows]))
    return tuple(found)


def differ(cards: Sequence[Gpu], names: Sequence[str] | None = None) -> str:
    """Return the sentence about cards that are not alike."""
    numbers = names or [str(n) for n in range(len(cards))]
    each = ", ".join(f"{n}: {c.name} {c.memory_bytes / GIB:.1f} GiB" for n, c in zip(numbers, cards, strict=True))
    return f"the cards differ ({each}); all ranks get equal parts, so the smallest and slowest decide"
