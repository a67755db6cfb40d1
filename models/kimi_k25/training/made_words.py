"""Word lists that the generators of made-up documents draw from."""


def _words(text: str) -> list[str]:
    """Separated by commas where a name has a space, by spaces otherwise."""
    return [part.strip() for part in text.split(",")] if "," in text else text.split()


NAMES = _words(
    "Tom Lily Max Anna Ben Mia Sam Zoe Leo Ella Jack Rosa Omar Nina Paul Ivy Kai Lucy Noah Emma Finn Ada Hugo Maya "
    "Theo Clara Eli Ruth Sara Dan Amir Yuki Chen Priya Diego Olga Lars Ines Kofi Aisha Peter Julia Mark Laura Alex "
    "Kim Robin Nora Felix Iris Oscar Eva David Maria John Alice Bob Carol Henry Grace"
)
ANIMALS = _words(
    "dog cat rabbit bear fox bird mouse horse duck frog turtle lion owl pony goat hen pig cow bee squirrel tiger wolf "
    "elephant monkey penguin whale"
)
THINGS = _words(
    "ball kite book hat drum lamp boat cup key coin bell box map shoe apple cake flower stone rope scarf pencil ring "
    "basket mirror clock chair spoon bottle"
)
PLACES = _words(
    "park garden forest kitchen school river cave barn market library yard village lake house tower beach museum bridge"
)
ADJECTIVES = _words(
    "red blue small big shiny old new soft round green yellow warm heavy pretty tiny golden quiet bright wooden strange"
)
FEELINGS = _words("happy sad tired hungry proud scared excited lonely calm curious")
CITIES = _words(
    "Paris, London, Tokyo, Berlin, Madrid, Rome, Cairo, Lima, Oslo, Dublin, Boston, Chicago, Sydney, Vienna, Athens, "
    "Prague, Lisbon, Seoul, Delhi, Toronto, Beijing, Shanghai, Moscow, Mumbai, Dallas, Seattle, Denver, Miami, "
    "Zurich, Geneva, Munich, Hamburg, Milan, Naples, Barcelona, Porto, Warsaw, Budapest, Helsinki, Stockholm, "
    "Copenhagen, Brussels, Amsterdam, Istanbul, Nairobi, Bangkok, Hanoi, Singapore, Jakarta, Manila, Osaka, Kyoto, "
    "Montreal, Vancouver, Havana, Bogota, Santiago, Austin, Houston, Phoenix, Edinburgh, Glasgow, Manchester, Lyon, "
    "Venice, Krakow, New York, San Francisco, Los Angeles, Buenos Aires, Mexico City, Cape Town, Rio de Janeiro"
)
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
COLORS = _words("red blue green yellow orange purple black white brown pink gray")
FOODS = _words(
    "bread rice soup pizza cheese salad pasta fish eggs beans tomatoes potatoes apples bananas carrots milk tea"
)
HOBBIES = _words("reading painting swimming cooking singing dancing running gardening chess football music photography")
JOBS = _words("teacher doctor baker pilot farmer singer nurse engineer writer painter cook driver lawyer student")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
SKIES = _words("sunny cloudy rainy windy snowy foggy stormy clear")
VERBS = _words("open find read move start stop check create delete update list send count sort save load print scan")
NOUNS = _words(
    "file user order ticket room flight song task note photo event invoice account message report table device alarm "
    "door light camera product page contact book recipe car train package"
)
ADVERBS = _words("quickly slowly quietly happily carefully")
SYLLABLES = _words("ba do ki lo ma ne po ra su ti ve zu qua fle gri sha tor mun bel dax")
KEYS = _words(
    "name title id count city date color size amount owner group level mode reason target source limit page label "
    "topic day price speed weight code status kind note text path user number"
)
