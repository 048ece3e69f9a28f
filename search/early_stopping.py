"""Giving an individual up before all its answers are there, at an error rate that holds however often one looks.

The least fit parent, whose fitness an individual has to reach, has answered the same questions. ``Race`` asks them in a
drawn order and bets against the individual's reaching it. If it would reach it, such bets are unfair to the bettor, and
by Ville's inequality a stake of 1 ever grows to 1/error with a probability of at most ``error``: so whoever stops when
it has, loses at most that share of the individuals that would have become parents. There is no correction to make for
looking after every answer (Waudby-Smith and Ramdas, arXiv 2010.09686; without replacement as here, arXiv 2006.04347).
"""

import math
from collections.abc import Sequence

BOLDNESS = 0.75
"""The most that is staked of what could be lost at once (arXiv 2010.09686 recommends 1/2 or 3/4)."""
ERROR = 0.3
"""How probable an error may be by default. 0.01 gains 0.3 points at most."""
SHARES = (0.0, 0.5, 1.0)
"""How much of the parent's score is subtracted from an individual's before betting on it: 1 suits similar answers, 0 a
poor individual. A third of the stake goes on each, and the mean of fair games is a fair game."""


class Bet:
    """A stake of 1 on a finite population's total being less than ``total``, its members coming in a random order.

    Each member is ``low`` to ``high``. ``wealth`` is what has become of the stake: while the sum of all members is
    ``total`` or more, it is expected to shrink.
    """

    def __init__(self, members: int, low: float, high: float, total: float) -> None:
        self.wealth = 1.0
        self._taken, self._left, self._missing = 0, members, total
        self._low, self._width = low, high - low
        # Both estimates begin with one imagined member: what the total takes on average, and the widest variance.
        self._sum = (total / members - low) / self._width
        self._squares = 0.25

    def take(self, value: float) -> None:
        """The next member is ``value``."""
        # What the members left would be on average, were the total just reached (all from 0 to 1 from here on).
        due = (self._missing / self._left - self._low) / self._width
        x = (value - self._low) / self._width
        mean, variance = self._sum / (self._taken + 1), self._squares / (self._taken + 1)
        if due > 1 + 1e-9:
            self.wealth = math.inf  # not even perfect ones would do
        elif due > mean:
            edge = due - mean
            stake = min(edge / (variance + edge * edge), BOLDNESS / max(1 - due, 1e-9))  # approximately Kelly's
            self.wealth *= 1 - stake * (x - due)
        self._missing -= value
        self._left -= 1
        self._sum += x
        self._taken += 1
        self._squares += (x - self._sum / (self._taken + 1)) ** 2


class Race:
    """An individual against the least fit parent, unit by unit: a unit is a question at all positions.

    Each unit adds ``lows`` to ``highs`` to an individual's fitness, and to the parent's what ``parent`` has. ``error``
    is the highest probability that an individual is ever ``lost`` which exceeds the parent's fitness by ``margin``.
    """

    def __init__(
        self, lows: Sequence[float], highs: Sequence[float], parent: Sequence[float], error: float, margin: float = 0.0
    ) -> None:
        self._parent, self._error = parent, error
        self.lost = False
        self._bets = [
            Bet(
                len(parent),
                min(low - share * y for low, y in zip(lows, parent, strict=True)),
                max(high - share * y for high, y in zip(highs, parent, strict=True)),
                (1 - share) * math.fsum(parent) + margin,
            )
            for share in SHARES
        ]

    def take(self, unit: int, value: float) -> None:
        """The next unit in the drawn order adds ``value`` to the individual's fitness."""
        for share, bet in zip(SHARES, self._bets, strict=True):
            bet.take(value - share * self._parent[unit])
        wealth = sum(bet.wealth for bet in self._bets) / len(self._bets)
        self.lost = self.lost or wealth >= 1 / self._error
