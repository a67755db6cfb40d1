"""Which cold KV blocks lie in the host's memory. Pure bookkeeping, the same on every rank; no tensors.

A block that is evicted from the device is saved to a slot of the host, where the least recently used content goes
first. What a prompt finds there is brought back into blocks of its own. Content that is brought back stays on the host
as well, so that evicting it again copies nothing. A step begins with the copies that its plan has led to: first all
saves, then all restores.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable


class HostCache:
    """`num_slots` slots, each for what one block holds."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._empty = deque(range(num_slots))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._saves: dict[int, int] = {}  # slot: block
        self._restores: dict[int, int] = {}  # block: slot
        self._readers: Counter[int] = Counter()  # of slots that the next step reads, which keep their content till then
        self._nameless: set[int] = set()  # slots with readers that nobody else will find
        self.num_restored = 0

    def __len__(self) -> int:
        """Slots with something in them that can be found."""
        return len(self._slots)

    def save(self, block: int, digest: bytes) -> None:
        """The device's block loses its content, as the next step finds it; where no slot can be had it is lost."""
        if self._restores.pop(block, None) is not None:
            return  # nothing came there yet: what was to come still is on the host
        if digest in self._slots:
            self._slots.move_to_end(digest)
        elif (slot := self._free_slot()) is not None:
            self._slots[digest] = slot
            self._saves[slot] = block

    def _free_slot(self) -> int | None:
        if self._empty:
            return self._empty.popleft()
        for digest, slot in self._slots.items():
            if not self._readers[slot]:
                del self._slots[digest]
                self._saves.pop(slot, None)
                return slot
        return None

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The slots of the leading digests that are here. They keep their content until the next step has begun."""
        found = []
        for digest in digests:
            slot = self._slots.get(digest)
            if slot is None:
                break
            self._slots.move_to_end(digest)
            self._readers[slot] += 1
            found.append(slot)
        return found

    def restore(self, slot: int, block: int) -> None:
        """The next step begins with what the slot holds in the block."""
        self._restores[block] = slot
        self.num_restored += 1

    def take_copies(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, slot) to be saved and (slot, block) to be restored, in this order, before a step computes."""
        saves = [(block, slot) for slot, block in self._saves.items()]
        restores = [(slot, block) for block, slot in self._restores.items()]
        self._saves, self._restores = {}, {}
        self._readers.clear()
        self._empty.extend(sorted(self._nameless))
        self._nameless.clear()
        return saves, restores

    def clear(self) -> None:
        """Nothing is found any more. What was found before still comes."""
        for slot in self._slots.values():
            if self._readers[slot]:
                self._nameless.add(slot)
            else:
                self._saves.pop(slot, None)
                self._empty.append(slot)
        self._slots.clear()
