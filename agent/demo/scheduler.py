"""An inference engine as a discrete-event model: queue, KV blocks, preemption, prefix cache, graph buckets, ranks.

`step` is told how fast each rank is and says how long the step took and who got a token. No clock, no thread: the
engine around it waits for as long as it was told.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
BLOCKS = 2048
MOST_SEQUENCES = 64
STEP_TOKENS = 2048  # prefilled in one step
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48)  # batch sizes with a captured graph; a batch is padded to the next
BASE_S, SEQUENCE_S, TOKEN_S = 0.045, 0.0002, 0.00002  # a step; each sequence of its graph; each prefilled token
EAGER = 1.4  # a batch beyond the largest graph runs without one


@dataclass(eq=False)
class Request:
    """One completion. `prompt`: the chained hashes of its whole blocks; `arrived_s` in the engine's own time."""

    number: int
    prompt_tokens: int
    prompt: Sequence[int]
    wanted: int
    arrived_s: float
    made: int = 0
    blocks: int = 0

    @property
    def tokens(self) -> int:
        """Of prompt and answer so far."""
        return self.prompt_tokens + self.made


@dataclass(frozen=True)
class Step:
    """What one step did. `batch`: sequences in it; `graph`: the captured size that it ran in, 0 for none."""

    took_s: float
    served: Sequence[Request]
    batch: int
    graph: int


def hashes(words: Sequence[str]) -> list[int]:
    """Of each whole block of a prompt, together with all before it: equal beginnings have equal hashes."""
    found, before = list[int](), 0
    for start in range(0, len(words) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = hash((before, *words[start : start + BLOCK_TOKENS]))
        found.append(before)
    return found


@dataclass
class Scheduler:
    """All that waits and runs. Counters are since the start."""

    blocks: int = BLOCKS
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def free(self) -> int:
        """Blocks that no running request holds."""
        return self.blocks - sum(one.blocks for one in self.running)

    @property
    def kv_share(self) -> float:
        """Blocks held ÷ blocks."""
        return 1.0 - self.free / self.blocks

    def add(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)

    def drop(self, number: int) -> None:
        """Its client has gone."""
        self.waiting = deque(one for one in self.waiting if one.number != number)
        self.running = [one for one in self.running if one.number != number]

    def step(self, speeds: Sequence[float]) -> Step | None:
        """One step of all ranks, the slowest of which paces it; None where there is nothing to do.

        `speeds`: clock ÷ full clock of each rank's GPU.
        """
        prefilled = self._admit()
        self._grow()
        if not self.running:
            return None
        batch = len(self.running)
        graph = next((size for size in GRAPHS if size >= batch), 0)
        took_s = BASE_S + SEQUENCE_S * (graph or batch) + TOKEN_S * prefilled
        took_s *= (1.0 if graph else EAGER) / max(min(speeds, default=1.0), 0.01)
        served = tuple(self.running)
        for one in served:
            one.made += 1
        self.running = [one for one in served if one.made < one.wanted]
        return Step(took_s, served, batch, graph)

    def _admit(self) -> int:
        """Take in who waits, oldest first, while there are blocks, seats and room in the step; tokens to prefill."""
        prefilled = 0
        while self.waiting and len(self.running) < MOST_SEQUENCES:
            one = self.waiting[0]
            needed = blocks_for(one.tokens + 1)
            new = one.tokens - BLOCK_TOKENS * self._hits(one)
            if needed > self.free or (prefilled and prefilled + new > STEP_TOKENS):
                break
            self.waiting.popleft()
            one.blocks = needed
            self.prefix_queries += one.tokens
            self.prefix_hits += one.tokens - new
            self._keep(one)
            self.running.append(one)
            prefilled += new
        return prefilled

    def _grow(self) -> None:
        """A block for each whose last is full; without a free one the youngest goes back into the queue."""
        for one in list(self.running):
            while one in self.running and blocks_for(one.tokens + 1) > one.blocks:
                if self.free:
                    one.blocks += 1
                else:
                    victim = self.running.pop()
                    victim.blocks = 0
                    self.preemptions += 1
                    self.waiting.appendleft(victim)

    def _hits(self, one: Request) -> int:
        """Blocks at the beginning of its prompt that are still there; the last token is always computed."""
        count = 0
        for block in one.prompt[: (one.tokens - 1) // BLOCK_TOKENS]:
            if block not in self._cached:
                break
            count += 1
        return count

    def _keep(self, one: Request) -> None:
        """Its blocks are the freshest of the cache."""
        for block in one.prompt:
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > self.blocks:
            self._cached.popitem(last=False)


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)
