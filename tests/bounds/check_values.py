"""Bounds of every divergence at one point, to 12 digits."""

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
