"""The vocabulary of the generated text."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Anna Ben Clara David Elena Felix Greta Hugo Iris Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tara Victor "
    "Wanda Yusuf Zoe Adam Bella Carlos Dora Emil Fiona Georg"
)
LAST_NAMES = _words(
    "Berg Costa Dietz Evans Fischer Garcia Hansen Ito Jensen Klein Lopez Meyer Novak Olsen Park Rossi Silva Tanaka "
    "Urban Vogel Weber Young Zeman Brown Keller Moreau"
)
CITIES = _words(
    "Porto Lima Oslo Kyoto Lyon Quito Cairo Delhi Turin Bergen Dublin Geneva Hanoi Krakow Madrid Nairobi Paris Rome "
    "Sofia Tunis Vienna Zurich Boston Austin"
)
PRODUCTS = _words(
    "lamp chair table kettle backpack notebook camera clock mirror bottle basket blanket speaker keyboard helmet "
    "jacket umbrella guitar wallet candle"
)
COLOURS = _words("red blue green black white yellow orange grey")
LANGUAGES = _words("Spanish Dutch German French Italian Polish Arabic Hindi Korean Greek")
TOPICS = _words("rivers bridges stars gardens engines islands music bread history birds ships maps")
ANIMALS = _words("cat dog horse parrot rabbit turtle hamster goat")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
SKIES = _words("sunny cloudy rainy windy snowy foggy")
CURRENCIES = ("EUR", "USD", "JPY", "GBP", "CHF")


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
