r"""Units of numbers, such as ``15\text{ cm}`` and ``9.8 m/s^2``, to compare quantities. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from services.extras.math_verify.words import table, without_fonts

_SI: Final[Mapping[str, Fraction]] = {
    prefix: Fraction(size)
    for prefix, size in table("n:1e-9 μ:1e-6 m:1e-3 c:1e-2 d:1e-1 k:1e3 M:1e6 G:1e9").items()
}
_SIZES: Final[Mapping[str, tuple[tuple[str, int], Fraction]]] = {
    symbol: (dimension, Fraction(size))
    for dimension, sizes in {
        ("length", 1): "m:1 in:0.0254 ft:0.3048 yd:0.9144 mi:1609.344",
        ("mass", 1): "g:1 t:1e6 lb:453.59237 oz:28.349523125",
        ("time", 1): "s:1 min:60 h:3600 day:86400 week:604800",
        ("months", 1): "month:1 year:12",
        ("length", 3): "l:0.001 gal:0.003785411784 qt:0.000946352946 pt:0.000473176473",
        ("angle", 1): "deg:1",
        ("radians", 1): "rad:1",
        ("celsius", 1): "celsius:1",
        ("fahrenheit", 1): "fahrenheit:1",
        ("kelvin", 1): "kelvin:1",
        ("energy", 1): "J:1 Wh:3600 cal:4.184",
        ("power", 1): "W:1",
        ("force", 1): "N:1",
        ("frequency", 1): "Hz:1",
        ("pressure", 1): "Pa:1 bar:1e5 atm:101325",
        ("voltage", 1): "V:1",
        ("amount", 1): "mol:1",
        ("length", 2): "ha:1e4 acre:4046.8564224",
        ("current", 1): "A:1",
        ("resistance", 1): "ohm:1",
        ("information", 1): "byte:8 KB:8000 MB:8e6 GB:8e9 TB:8e12 bit:1",
    }.items()
    for symbol, size in table(sizes).items()
}
"""Dimension and size of each unit."""
_DERIVED: Final[Mapping[str, tuple[int, Mapping[str, int]]]] = {
    "force": (1000, {"mass": 1, "length": 1, "time": -2}),
    "energy": (1000, {"mass": 1, "length": 2, "time": -2}),
    "power": (1000, {"mass": 1, "length": 2, "time": -3}),
    "pressure": (1000, {"mass": 1, "length": -1, "time": -2}),
}
"""Size of a unit of a derived quantity in grams, metres and seconds, and exponents of those."""
_PREFIX_WORDS: Final[Mapping[str, str]] = table(
    "kilo:k centi:c milli:m deci:d nano:n micro:μ mega:M giga:G",
)
_PREFIXED: Final = frozenset(
    table("m: g: s: l: J: W: Wh: cal: bar: A: byte: bit: N: Hz: Pa: V: mol:")
)
_SPELLINGS: Final[Mapping[str, str]] = table(
    "meter:m metre:m inch:in inche:in foot:ft feet:ft ':ft yard:yd mile:mi gram:g gm:g",
    "tonne:t pound:lb lbs:lb ounce:oz second:s sec:s minute:min hour:h hr:h yr:year liter:l",
    "litre:l L:l gallon:gal degree:deg radian:rad K:kelvin joule:J watt:W newton:N hertz:Hz",
    "pascal:Pa volt:V mole:mol watt-hour:Wh calorie:cal Cal:cal atmosphere:atm hectare:ha",
    "quart:qt pint:pt ampere:A amp:A kilobyte:KB kB:KB megabyte:MB gigabyte:GB terabyte:TB",
    r"^\circ:deg ^{\circ}:deg \circ:deg \degree:deg °:deg °C:celsius °Celsius:celsius",
    r"°celsius:celsius ^\circC:celsius ^{\circ}C:celsius °F:fahrenheit °Fahrenheit:fahrenheit",
    r"°fahrenheit:fahrenheit ^\circF:fahrenheit ^{\circ}F:fahrenheit \Omega:ohm Ω:ohm",
    '":in \N{DOUBLE PRIME}:in \N{PRIME}:ft',
)
_COMPOUND: Final[Mapping[str, str]] = {
    "mph": "mi/h",
    **dict.fromkeys(("kmh", "kph", "kmph"), "km/h"),
    "cc": "cm^3",
}
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
    plain = _FRACTION.sub(r"\1/\2", without_fonts(answer, " "))
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
