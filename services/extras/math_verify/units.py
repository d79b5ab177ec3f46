r"""Units of numbers, such as ``15\text{ cm}`` and ``9.8 m/s^2``, to compare quantities. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

_SI: Final[Mapping[str, Fraction]] = {
    prefix: Fraction(10) ** exponent
    for prefix, exponent in {
        "n": -9,
        "μ": -6,
        "m": -3,
        "c": -2,
        "d": -1,
        "k": 3,
        "M": 6,
        "G": 9,
    }.items()
}
_SIZES: Final[Mapping[str, tuple[tuple[str, int], Fraction]]] = {
    "m": (("length", 1), Fraction(1)),
    "in": (("length", 1), Fraction("0.0254")),
    "ft": (("length", 1), Fraction("0.3048")),
    "yd": (("length", 1), Fraction("0.9144")),
    "mi": (("length", 1), Fraction("1609.344")),
    "g": (("mass", 1), Fraction(1)),
    "t": (("mass", 1), Fraction(10**6)),
    "lb": (("mass", 1), Fraction("453.59237")),
    "oz": (("mass", 1), Fraction("28.349523125")),
    "s": (("time", 1), Fraction(1)),
    "min": (("time", 1), Fraction(60)),
    "h": (("time", 1), Fraction(3600)),
    "day": (("time", 1), Fraction(86400)),
    "week": (("time", 1), Fraction(604800)),
    "month": (("months", 1), Fraction(1)),
    "year": (("months", 1), Fraction(12)),
    "l": (("length", 3), Fraction(1, 1000)),
    "gal": (("length", 3), Fraction("0.003785411784")),
    "deg": (("angle", 1), Fraction(1)),
    "rad": (("radians", 1), Fraction(1)),
    "celsius": (("celsius", 1), Fraction(1)),
    "fahrenheit": (("fahrenheit", 1), Fraction(1)),
    "kelvin": (("kelvin", 1), Fraction(1)),
    "J": (("energy", 1), Fraction(1)),
    "W": (("power", 1), Fraction(1)),
    "N": (("force", 1), Fraction(1)),
    "Hz": (("frequency", 1), Fraction(1)),
    "Pa": (("pressure", 1), Fraction(1)),
    "V": (("voltage", 1), Fraction(1)),
    "mol": (("amount", 1), Fraction(1)),
    "Wh": (("energy", 1), Fraction(3600)),
    "cal": (("energy", 1), Fraction("4.184")),
    "bar": (("pressure", 1), Fraction(10**5)),
    "atm": (("pressure", 1), Fraction(101325)),
    "ha": (("length", 2), Fraction(10**4)),
    "acre": (("length", 2), Fraction("4046.8564224")),
    "qt": (("length", 3), Fraction("0.000946352946")),
    "pt": (("length", 3), Fraction("0.000473176473")),
    "A": (("current", 1), Fraction(1)),
    "ohm": (("resistance", 1), Fraction(1)),
    "byte": (("information", 1), Fraction(8)),
    "KB": (("information", 1), Fraction(8 * 10**3)),
    "MB": (("information", 1), Fraction(8 * 10**6)),
    "GB": (("information", 1), Fraction(8 * 10**9)),
    "TB": (("information", 1), Fraction(8 * 10**12)),
    "bit": (("information", 1), Fraction(1)),
}
"""Dimension and size of each unit."""
_DERIVED: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "force": (1000, {"mass": 1, "length": 1, "time": -2}),
    "energy": (1000, {"mass": 1, "length": 2, "time": -2}),
    "power": (1000, {"mass": 1, "length": 2, "time": -3}),
    "pressure": (1000, {"mass": 1, "length": -1, "time": -2}),
}
"""Size of a unit of a derived quantity in grams, metres and seconds, and exponents of those."""
_PREFIX_WORDS: Final[Mapping[str, str]] = {
    "kilo": "k",
    "centi": "c",
    "milli": "m",
    "deci": "d",
    "nano": "n",
    "micro": "μ",
    "mega": "M",
    "giga": "G",
}
_PREFIXED: Final = frozenset(
    {
        "m",
        "g",
        "s",
        "l",
        "J",
        "W",
        "Wh",
        "cal",
        "bar",
        "A",
        "byte",
        "bit",
        "N",
        "Hz",
        "Pa",
        "V",
        "mol",
    }
)
_SPELLINGS: Final[Mapping[str, str]] = {
    spelling: unit
    for unit, spellings in {
        "m": ("meter", "metre"),
        "in": ("inch", "inche", '"', "\N{DOUBLE PRIME}"),
        "ft": ("foot", "feet", "'", "\N{PRIME}"),
        "yd": ("yard",),
        "mi": ("mile",),
        "g": ("gram", "gm"),
        "t": ("tonne",),
        "lb": ("pound", "lbs"),
        "oz": ("ounce",),
        "s": ("second", "sec"),
        "min": ("minute",),
        "h": ("hour", "hr"),
        "year": ("yr",),
        "l": ("liter", "litre", "L"),
        "gal": ("gallon",),
        "deg": ("degree", "°", "^\\circ", "^{\\circ}", "\\circ", "\\degree"),
        "rad": ("radian",),
        "celsius": ("°C", "°Celsius", "°celsius", "^\\circC", "^{\\circ}C"),
        "fahrenheit": ("°F", "°Fahrenheit", "°fahrenheit", "^\\circF", "^{\\circ}F"),
        "kelvin": ("K",),
        "J": ("joule",),
        "W": ("watt",),
        "N": ("newton",),
        "Hz": ("hertz",),
        "Pa": ("pascal",),
        "V": ("volt",),
        "mol": ("mole",),
        "Wh": ("watt-hour",),
        "cal": ("calorie", "Cal"),
        "atm": ("atmosphere",),
        "ha": ("hectare",),
        "qt": ("quart",),
        "pt": ("pint",),
        "A": ("ampere", "amp"),
        "KB": ("kilobyte", "kB"),
        "MB": ("megabyte",),
        "GB": ("gigabyte",),
        "TB": ("terabyte",),
        "ohm": ("Ω", "\\Omega"),
    }.items()
    for spelling in spellings
}
_COMPOUND: Final[Mapping[str, str]] = {
    "mph": "mi/h",
    **dict.fromkeys(("kmh", "kph", "kmph"), "km/h"),
    "cc": "cm^3",
}
_FONT: Final = re.compile(r"\\(?:text\w*|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_FRACTION: Final = re.compile(r"\\[dt]?frac\s*\{([A-Za-z\s]+)\}\s*\{([A-Za-z\s]+)\}")
_QUANTITY: Final = re.compile(
    r"\s*\$?(?P<number>[-+]?[\d(.\\](?:.*?(?:[\d)}]|\\pi))?)\s*\$?(?:\s|~|\\[,;:! ])*"
    r"(?P<unit>(?<![\^_{])(?:/\s*(?=[A-Za-z])|°|\^\s*\{?\s*\\circ\s*\}?|\\degree"
    r"|[A-Za-zμΩ]|['\"\N{PRIME}\N{DOUBLE PRIME}])[^\d=<>]*(?:[23][^\d=<>]*)*)",
    re.DOTALL,
)
_FACTOR: Final = re.compile(r"([^\s^/*]+?)\^?\{?(-?[23])?\}?")


_MAX_CHARACTERS: Final = 200
"""Max length of a number with a unit."""
_UNCOUNTED: Final = ("dollar", "dollars", "and")
_SEVERAL: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z.]+)(?:\s*,\s*|\s+and\s+|\s+|$)")
_GROUPED: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_WORD: Final = re.compile(r"[A-Za-z]")
_OF_ANGLE: Final = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp)(?![A-Za-z])")
"""Functions, whose argument has the unit that follows them."""
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Unit:
    """Product of powers of units."""

    dimension: tuple[tuple[str, int], ...]
    """Exponent of each base quantity."""
    size: Fraction
    """In units of the base quantities."""

    @property
    def is_degree(self) -> bool:
        return self.dimension == (("angle", 1),)


def split(answer: str) -> tuple[str, Unit | None]:
    """Splits an answer into number and unit; the unit is None if the answer has none that is listed here."""
    if len(answer) > _MAX_CHARACTERS:
        return answer, None
    previous, plain = None, answer
    while previous != plain:
        previous, plain = plain, _FONT.sub(r" \1", plain)
    plain = _FRACTION.sub(r"\1/\2", plain)
    plain = plain.strip(" .$")
    if (total := _sum(plain)) is not None:
        return total
    quantity = _QUANTITY.fullmatch(plain)
    number = quantity["number"] if quantity else ""
    if not quantity or _WORD.search(_COMMAND.sub("", number)) or _OF_ANGLE.search(number):
        return answer, None
    unit = unit_of(quantity["unit"])
    if unit is None:
        return answer, None
    return number.replace(",", "") if _GROUPED.fullmatch(number) else number, unit


def _sum(text: str) -> tuple[str, Unit] | None:
    """Adds quantities such as ``2 hours and 30 minutes``; returns None if a text is anything else."""
    pieces = [*_SEVERAL.finditer(text)]
    terms = [(Fraction(piece[1]), unit_of(piece[2])) for piece in pieces]
    if len(terms) < 2 or "".join(piece[0] for piece in pieces) != text:
        return None
    total, last = Fraction(0), terms[-1][1]
    if last is None:
        return None
    for value, unit in terms:
        if unit is None or unit.dimension != last.dimension:
            return None
        total += value * unit.size / last.size
    return f"\\frac{{{total.numerator}}}{{{total.denominator}}}", last


def are_angles(first: Unit, other: Unit) -> bool:
    """Returns True if one unit is a degree and the other a radian."""
    return {first.dimension, other.dimension} == {(("angle", 1),), (("radians", 1),)}


def unit_of(text: str) -> Unit | None:
    """Returns the unit that a text names, such as ``km/h`` and ``square feet``; None for any other text."""
    text = re.sub(r"\bper\b", "/", text.replace("\\cdot", " ").replace("·", " "))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?\s*|\\degree\s*|\bdegrees?\s+(?=[CFcf])", "°", text)
    text = re.sub(r"\\[,;:! ]|[~$]", " ", text)
    text = re.sub(r"\b(?:square|sq\.?)\s+([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+([A-Za-z]+)", r"\1^3", text)
    text = text.replace(" squared", "^2").replace(" cubed", "^3")
    dimension: dict[str, int] = {}
    size = Fraction(1)
    for index, side in enumerate(text.split("/")):
        factors = [word for word in side.split() if word not in _UNCOUNTED]
        if not factors and index:
            return None
        for factor_text in factors:
            factor = _FACTOR.fullmatch(factor_text.rstrip("."))
            unit = factor and _unit(factor[1])
            if not factor or unit is None:
                return None
            power = int(factor[2] or 1) * (-1 if index else 1)
            size *= unit.size**power
            for name, exponent in unit.dimension:
                factor_size, bases = _DERIVED.get(name, (1, {name: 1}))
                size *= Fraction(factor_size) ** (exponent * power)
                for base, base_exponent in bases.items():
                    dimension[base] = dimension.get(base, 0) + base_exponent * exponent * power
    quantities = tuple(sorted((name, power) for name, power in dimension.items() if power))
    return Unit(quantities, size) if quantities else None


def _unit(name: str) -> Unit | None:
    for spelling in (name, name.casefold()):
        for singular in (spelling, spelling.removesuffix("s")):
            if singular in _COMPOUND:
                return unit_of(_COMPOUND[singular])
            symbol = _SPELLINGS.get(singular, singular)
            if symbol in _SIZES:
                dimension, size = _SIZES[symbol]
                return Unit((dimension,), size)
            for prefix in (*_PREFIX_WORDS, *_SI):
                base = singular.removeprefix(prefix)
                symbol = _SPELLINGS.get(base, base)
                if base != singular and symbol in _PREFIXED and (base == symbol) == (prefix in _SI):
                    dimension, size = _SIZES[symbol]
                    scale = _SI[_PREFIX_WORDS.get(prefix, prefix)]
                    return Unit((dimension,), size * scale)
    return None
