"""A permutation of any number of samples that is computed where it is asked for, and kept nowhere.

A Feistel network over the least rectangle of `rows` x 2**bits that holds them all: in turns one coordinate is
moved on by a keyed hash of the other one, which can be undone, whatever the hash. What falls behind the last
sample, less than one in a hundred, is sent through again until it does not. Both are by J. Black, P. Rogaway,
*Ciphers with Arbitrary Finite Domains*, CT-RSA 2002 (generalised Feistel cipher, cycle walking). That such a
network shuffles as drawing lots does is measured in R. Mitchell, D. Stokes, E. Frank, G. Holmes,
*Bandwidth-Optimal Random Shuffling for GPUs*, ACM Transactions on Parallel Computing 9 (2022), arXiv
2106.06161, and of this one by `tests/loaders/order/test_keyed.py`. The hash is the middle of
D. Stafford's *Mix13*, which ends splitmix64, too; its highest bits are taken.

It shuffles; it is not a cipher.
"""

import numpy as np
import numpy.typing as npt

from loaders.batch import Positions

_Words = npt.NDArray[np.uint64]
_ROUNDS = 10  # 6 pass the tests of 1,000 samples, where hashes of 5 bits are the least random
_CHUNK = 1 << 14  # a few arrays of it fit into a core's cache
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


class KeyedPermutation:
    """A permutation of 0 to `count` - 1, which `key` gives: any integers from 0 on.

    The same on every machine and with every version of NumPy. To be used for many samples: of a few, of which
    each hash has few bits, not all permutations come as often.
    """

    def __init__(self, count: int, key: tuple[int, ...]) -> None:
        bits = (count - 1).bit_length() // 2
        self._count = np.uint64(count)
        self._bits = np.uint64(bits)
        self._rows = np.uint64(-(-count >> bits))
        keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
        self._rounds = [(number, np.uint64(one)) for number, one in enumerate(keys)]

    def at(self, places: Positions) -> Positions:
        """What comes at `places`: int64 [n] each."""
        return self._walk(places, forward=True)

    def places_of(self, positions: Positions) -> Positions:
        """Where `positions` come: int64 [n] each."""
        return self._walk(positions, forward=False)

    def _walk(self, values: Positions, *, forward: bool) -> Positions:
        out = np.empty(len(values), np.int64)
        for start in range(0, len(values), _CHUNK):
            part = self._permute(values[start : start + _CHUNK].astype(np.uint64), forward)
            behind = np.flatnonzero(part >= self._count)
            while len(behind):
                again = part[behind] = self._permute(part[behind], forward)
                behind = behind[again >= self._count]
            out[start : start + _CHUNK] = part.view(np.int64)
        return out

    def _permute(self, values: _Words, forward: bool) -> _Words:
        """Of 0 to rows * 2**bits - 1, through the network once."""
        row: _Words = values >> self._bits
        column = values & ((np.uint64(1) << self._bits) - np.uint64(1))
        hashed, other = np.empty_like(values), np.empty_like(values)
        for number, key in self._rounds if forward else self._rounds[::-1]:
            of_row = number % 2 == 0  # is moved on
            np.bitwise_xor(column if of_row else row, key, out=hashed)
            np.multiply(hashed, _FACTORS[0], out=hashed)
            np.right_shift(hashed, _HALF, out=other)
            np.bitwise_xor(hashed, other, out=hashed)
            np.multiply(hashed, _FACTORS[1], out=hashed)
            np.right_shift(hashed, _HALF, out=hashed)
            if of_row:
                self._move(row, hashed, other, forward)
            else:
                np.right_shift(hashed, _HALF - self._bits, out=hashed)
                np.bitwise_xor(column, hashed, out=column)
        np.left_shift(row, self._bits, out=row)
        np.bitwise_or(row, column, out=row)
        return row

    def _move(self, row: _Words, hashed: _Words, other: _Words, forward: bool) -> None:
        """Add `hashed`, of 32 bits, as a share of all rows, or take it off again; in a circle.

        The lesser of two is the one that has not gone round 2**64.
        """
        np.multiply(hashed, self._rows, out=hashed)
        np.right_shift(hashed, _HALF, out=hashed)
        if forward:
            np.add(row, hashed, out=row)
            np.subtract(row, self._rows, out=other)
        else:
            np.subtract(row, hashed, out=row)
            np.add(row, self._rows, out=other)
        np.minimum(row, other, out=row)
