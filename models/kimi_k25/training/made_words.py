"""Word lists that the generators of made-up documents draw from."""

NAMES = (
    "Tom Lily Max Anna Ben Mia Sam Zoe Leo Ella Jack Rosa Omar Nina Paul Ivy Kai Lucy Noah Emma Finn Ada Hugo Maya Theo "
    "Clara Eli Ruth Sara Dan Amir Yuki Chen Priya Diego Olga Lars Ines Kofi Aisha Peter Julia Mark Laura Alex Kim Robin "
    "Nora Felix Iris Oscar Eva David Maria John Alice Bob Carol Henry Grace"
).split()
ANIMALS = (
    "dog cat rabbit bear fox bird mouse horse duck frog turtle lion owl pony goat hen pig cow bee squirrel tiger wolf "
    "elephant monkey penguin whale"
).split()
THINGS = (
    "ball kite book hat drum lamp boat cup key coin bell box map shoe apple cake flower stone rope scarf pencil ring "
    "basket mirror clock chair spoon bottle"
).split()
PLACES = (
    "park garden forest kitchen school river cave barn market library yard village lake house tower beach museum bridge"
).split()
ADJECTIVES = (
    "red blue small big shiny old new soft round green yellow warm heavy pretty tiny golden quiet bright wooden strange"
).split()
FEELINGS = "happy sad tired hungry proud scared excited lonely calm curious".split()
CITIES = (
    "Paris London Tokyo Berlin Madrid Rome Cairo Lima Oslo Dublin Boston Chicago Sydney Vienna Athens Prague Lisbon "
    "Seoul Delhi Toronto Beijing Shanghai Moscow Mumbai Dallas Seattle Denver Miami Zurich Geneva Munich Hamburg Milan "
    "Naples Barcelona Porto Warsaw Budapest Helsinki Stockholm Copenhagen Brussels Amsterdam Istanbul Nairobi Bangkok "
    "Hanoi Singapore Jakarta Manila Osaka Kyoto Montreal Vancouver Havana Bogota Santiago Austin Houston Phoenix "
    "Edinburgh Glasgow Manchester Lyon Venice Krakow"
).split() + ["New York", "San Francisco", "Los Angeles", "Buenos Aires", "Mexico City", "Cape Town", "Rio de Janeiro"]
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
COLORS = "red blue green yellow orange purple black white brown pink gray".split()
FOODS = (
    "bread rice soup pizza cheese salad pasta fish eggs beans tomatoes potatoes apples bananas carrots milk tea".split()
)
HOBBIES = "reading painting swimming cooking singing dancing running gardening chess football music photography".split()
JOBS = "teacher doctor baker pilot farmer singer nurse engineer writer painter cook driver lawyer student".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SKIES = "sunny cloudy rainy windy snowy foggy stormy clear".split()
VERBS = "open find read move start stop check create delete update list send count sort save load print scan".split()
NOUNS = (
    "file user order ticket room flight song task note photo event invoice account message report table device alarm "
    "door light camera product page contact book recipe car train package"
).split()
ADVERBS = "quickly slowly quietly happily carefully".split()
SYLLABLES = "ba do ki lo ma ne po ra su ti ve zu qua fle gri sha tor mun bel dax".split()
