"""Reference bounds with 40 digits, by bisection from the definition g(p, r) = p·f(r) + (1−p)·f((1−rp)/(1−p))."""

from functools import cache

import mpmath as mp

mp.mp.dps = 40

CHECK_VALUES = {
    "kl": (0.261695843479, 2.41055379376),
    "reverse-kl": (0.135680527438, 2.22811829954),
    "tv": (0.375, 1.625),
    "chi2": (0.241712455595, 1.75828754441),
    "neyman": (0.468898823699, 2.0311011763),
    "hellinger": (0.0490474798726, 2.98782752013),
    "le-cam": (0.166355765755, 2.3458393562),
    "js": (0.0, 4.0946982543),
}
"""(lower, upper) at p = 0.08 and δ = 0.05, by 40-digit arithmetic."""


def _u_log_u(u: mp.mpf) -> mp.mpf:
    return u * mp.log(u) if u else mp.mpf(0)


F = {
    "kl": lambda u: -mp.log(u) + u - 1 if u else mp.inf,
    "reverse-kl": lambda u: _u_log_u(u) - u + 1,
    "tv": lambda u: abs(u - 1) / 2,
    "chi2": lambda u: (u - 1) ** 2,
    "neyman": lambda u: (u - 1) ** 2 / u if u else mp.inf,
    "hellinger": lambda u: (mp.sqrt(u) - 1) ** 2,
    "le-cam": lambda u: (u - 1) ** 2 / (u + 1),
    "js": lambda u: (_u_log_u(u) - (u + 1) * mp.log((u + 1) / 2)) / 2,
}


@cache
def oracle(name: str, logp: float | mp.mpf, delta: float) -> tuple[mp.mpf, mp.mpf]:
    """Return the (lower, upper) ratio of one token, by bisection of the ratio on a logarithmic scale."""
    f, p, m = F[name], mp.exp(mp.mpf(logp)), -mp.expm1(mp.mpf(logp))

    def outside(r: mp.mpf, other: mp.mpf) -> bool:
        return p * f(r) + m * f(other) > delta

    def ratios(t: mp.mpf) -> tuple[mp.mpf, mp.mpf]:
        other = 1 / (1 + p * mp.expm1(t))
        return mp.exp(t) * other, other

    def root(side: int) -> mp.mpf:
        inner, outer = mp.mpf(0), mp.mpf(side)
        while not outside(*ratios(outer)):
            inner, outer = outer, 2 * outer
        for _ in range(70):
            middle = (inner + outer) / 2
            inner, outer = (inner, middle) if outside(*ratios(middle)) else (middle, outer)
        return ratios(inner)[0]

    lower = root(-1) if outside(mp.mpf(0), 1 / m) else mp.mpf(0)
    return lower, root(+1) if outside(1 / p, mp.mpf(0)) else 1 / p


def rounding_change(name: str, logp: float, delta: float) -> tuple[mp.mpf, mp.mpf]:
    """Return the relative change of each bound for one rounding error (1e-16) of p: the limit of double precision."""
    base, moved = oracle(name, logp, delta), oracle(name, mp.mpf(logp) - mp.mpf(10) ** -16, delta)
    return tuple(abs(a - b) / a if a else mp.mpf(0) for a, b in zip(base, moved, strict=True))
