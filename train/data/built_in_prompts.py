"""Built-in prompts: questions and tasks of many kinds, for targets that answer to be learnt from.

Written for specrun, by templates over lists, so that they belong to nobody else. Only what is asked
counts: the answers are the target's own.
"""

from __future__ import annotations

import itertools
import random

from specrun.bindings.errors import OptionError
from specrun.train.data.data_file import Answered, Document

_TOPICS = """
photosynthesis; the water cycle; how vaccines work; plate tectonics; black holes; the French
Revolution; inflation; supply and demand; machine learning; the internet; recursion; public-key
encryption; how bread rises; gravity; the seasons; volcanoes; coral reefs; honey bees; the Roman
Empire; the Silk Road; jazz; impressionism; haiku; chess; football; yoga; sleep; vitamins;
allergies; antibiotics; DNA; evolution; dinosaurs; penguins; whales; wolves; rivers; deserts;
glaciers; rain forests; recycling; solar panels; wind turbines; batteries; electric cars;
bicycles; trains; bridges; lighthouses; castles; pyramids; coffee; chocolate; cheese; rice; tea;
olive oil; spices; knitting; pottery; photography; theatre; opera; the violin; the piano; poetry;
fairy tales; newspapers; libraries; museums; schools; democracy; taxes; insurance; banks; the
stock market; contracts; the United Nations; human rights; courts; elections; databases; operating
systems; compilers; sorting algorithms; version control; spreadsheets; email; robots; satellites;
the Moon; Mars; comets; tides; rainbows; thunderstorms; snow; earthquakes; maps; compasses;
clocks; calendars; money; paper; glass; steel; concrete; plastic; cotton; silk; the human heart;
the brain; muscles; bones; teeth; the immune system
"""
_ABOUT = (
    "What is {0}? Explain it in simple words.",
    "Explain {0} to a ten-year-old child.",
    "Give me five interesting facts about {0}.",
    "Why does {0} matter in everyday life?",
    "Write a short paragraph that introduces {0}.",
    "What are common misunderstandings about {0}?",
    "Write three quiz questions about {0}, with their answers.",
    "Summarize the most important things to know about {0} as a list.",
    "Tell me about the history of {0}.",
    "Write a short poem about {0}.",
    "How would you describe {0} to somebody who has never heard of it?",
    "What should a beginner who wants to learn about {0} read or do first?",
)
_PAIRS = """
cats|dogs; coffee|tea; trains|planes; cities|villages; books|films; summer|winter; email|letters;
Python|JavaScript; lists|dictionaries; a lake|an ocean; weather|climate; a virus|a bacterium;
renting|buying a home; cash|credit cards; swimming|running; solar power|wind power; butter|olive
oil; a novel|a short story; working at home|working in an office; a comet|an asteroid;
mammals|reptiles; speed|acceleration; mass|weight; a fruit|a vegetable; stocks|bonds
"""
_BETWEEN = (
    "What is the difference between {0} and {1}?",
    "Compare {0} and {1} in a table with three rows.",
    "Which is better, {0} or {1}? Give reasons for both.",
    "Write a short dialogue between a friend of {0} and a friend of {1}.",
)
_DEEDS = """
bake a loaf of bread; change a bicycle tyre; plant tomatoes; write a job application; prepare for
an exam; save money; learn a language; fall asleep faster; make a budget; clean a kitchen;
organize a birthday party; start running; take good photographs; train a puppy; cook rice; make an
omelette; plan a week in Italy; build a bird house; give a speech; paint a wall; remove a coffee
stain; read more books; set up a wireless network; back up a computer; choose a laptop; write a
diary; grow herbs on a balcony; pack for a hike; move to a new city; host a dinner for six; learn
the guitar; improve my handwriting; meditate; stop procrastinating; remember names; write a good
password; lead a meeting
"""
_HOW = (
    "How do I {0}?",
    "Give me a step-by-step guide: how to {0}.",
    "What do I need to {0}, and what are common mistakes?",
    "List seven tips that help to {0}.",
    "I have only one hour a day. How can I {0}?",
    "Write an encouraging message to a friend who wants to {0}.",
)
_TASKS = """
reverses a string; finds the largest number in a list; counts the words of a text; checks whether
a number is prime; removes duplicates from a list; computes the factorial of a number; sorts a
list of names by length; merges two dictionaries; reads a CSV file and prints its first row;
converts Celsius to Fahrenheit; finds the most common letter in a text; flattens a nested list;
checks whether a text is a palindrome; computes the average of a list; generates the first
Fibonacci numbers; counts the vowels in a word; finds the common elements of two lists; rounds a
price to two digits; measures how long another function takes; rolls two dice; finds all files
with a given ending in a folder; parses a date
"""
_CODE = (
    "Write a Python function that {0}.",
    "Write a Python function that {0}, and explain it line by line.",
    "Write a JavaScript function that {0}.",
    "Write a test for a Python function that {0}.",
)
_PEOPLE = """
a teacher; a nurse; a pilot; a baker; a detective; a lighthouse keeper; a young inventor; a
retired sailor; a gardener; a clockmaker; a librarian; a shy dragon; a robot that wants to paint;
a girl who finds a map; two brothers; a lost dog; an astronaut; a violinist; a mountain guide; a
fisherman; a king without a crown; a student on the first day; a taxi driver
"""
_STORIES = (
    "Write a short story about {0}.",
    "Write the first paragraph of a novel about {0}.",
    "Describe a day in the life of {0}.",
    "Write a letter that {0} might write to an old friend.",
    "Invent three questions for an interview with {0}, and answer them.",
)
_SENTENCES = """
The meeting was moved from Tuesday to Thursday because the manager is ill.; We are sorry that your
order has arrived late.; The results are not as good as we hoped, but we learnt a lot.; He don't
like the movie because it were too long.; Our new product saves time, costs less and is easy to
use.; The old bridge was closed for repairs in the spring.; I can not come to the party tomorrow,
my train has been cancelled.; The museum opens at nine and closes at six on weekdays.; Many people
believe that reading every day makes them happier.; The children was playing in the garden when it
start to rain.; Please send the report before Friday so that we can check the numbers.; The soup
tastes good but it needs a little more salt.
"""
_REWRITE = (
    "Rewrite this sentence so that it sounds more formal: {0}",
    "Correct the grammar of this sentence: {0}",
    "Translate into French: {0}",
    "Translate into Spanish: {0}",
    "Say the same in a friendlier way: {0}",
    "Continue with three more sentences: {0}",
    "Write an email of five sentences that begins like this: {0}",
)
_AMOUNTS = (
    (3, 4),
    (12, 5),
    (7, 8),
    (15, 6),
    (24, 9),
    (30, 7),
    (48, 12),
    (60, 25),
    (90, 15),
    (120, 35),
)
_SUMS = (
    "What is {0} plus {1}? Show your steps.",
    "A box holds {0} apples. How many apples are in {1} boxes?",
    "Anna has {0} coins and gives {1} of them away. How many are left, and why?",
    "A train goes {0} kilometres in an hour. How far does it go in {1} hours?",
    "Write a word problem with the numbers {0} and {1}, and solve it.",
)
_KINDS = """
animals that live in the sea; countries in South America; musical instruments; breakfast ideas;
board games; old inventions; words that describe weather; things to do on a rainy day; healthy
snacks; gifts under ten euros; famous rivers; sports that need no ball; names for a cat; questions
to ask a new colleague; uses of a paper clip; good habits; tools in a workshop; titles for a
mystery novel; slogans for a bakery; topics for a school project
"""
_LISTS = (
    "List ten {0}.",
    "Name five {0} and say one sentence about each.",
    "Give three {0} as a JSON array of objects with a name and a reason.",
)


def _items(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(";")]


def _all_prompts() -> list[str]:
    """Return every prompt that there is, template by template."""
    filled = (
        (_ABOUT, [(item,) for item in _items(_TOPICS)]),
        (_BETWEEN, [tuple(pair.split("|")) for pair in _items(_PAIRS)]),
        (_HOW, [(item,) for item in _items(_DEEDS)]),
        (_CODE, [(item,) for item in _items(_TASKS)]),
        (_STORIES, [(item,) for item in _items(_PEOPLE)]),
        (_REWRITE, [(item,) for item in _items(_SENTENCES)]),
        (_SUMS, list(_AMOUNTS)),
        (_LISTS, [(item,) for item in _items(_KINDS)]),
    )
    return [
        template.format(*values)
        for templates, fillings in filled
        for template, values in itertools.product(templates, fillings)
    ]


def most_prompts() -> int:
    """Return how many built-in prompts there are."""
    return len(_all_prompts())


def built_in_prompts(count: int) -> list[Document]:
    """Return `count` of the built-in prompts, mixed; a smaller count gives the first of a larger.

    Raises OptionError where there are not so many.
    """
    prompts = _all_prompts()
    if not 1 <= count <= len(prompts):
        raise OptionError(
            f"{count} built-in prompts are asked for: give 1 to {len(prompts)}, or your own "
            "(--prompts FILE)"
        )
    random.Random(0).shuffle(prompts)  # the same order for everybody, so that answers can be kept
    return [Answered(prompt, None, origin="a built-in prompt") for prompt in prompts[:count]]
