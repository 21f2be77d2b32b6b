"""Whole questions as people put them: wordings times topics, tens of thousands, so that few are drawn twice."""

import hashlib

import numpy as np

_TOPICS = """
the moon / the sun / the stars / the planets / black holes / gravity / light / sound / heat / electricity
magnetism / atoms / molecules / water / ice / clouds / rain / snow / lightning / rainbows / the weather
the seasons / the climate / volcanoes / earthquakes / mountains / rivers / oceans / deserts / forests / islands
glaciers / tides / trees / flowers / grass / mushrooms / bees / ants / spiders / butterflies / birds / owls
penguins / whales / dolphins / sharks / fish / frogs / snakes / dinosaurs / elephants / lions / wolves / bears
horses / cows / dogs / cats / mice / the human heart / the brain / the lungs / muscles / bones / blood / skin
the eye / dreams / sleep / memory / pain / viruses / bacteria / vaccines / antibiotics / allergies / cancer
diabetes / stress / anxiety / depression / headaches / exercise / running / yoga / swimming / cycling / football
tennis / basketball / chess / meditation / healthy eating / vitamins / protein / sugar / salt / coffee / tea
chocolate / bread / cheese / pasta / soup / rice / pancakes / an omelette / a salad / a birthday cake / apple pie
tomato sauce / vegetables / a garden / house plants / composting / recycling / solar energy / wind power
nuclear power / batteries / electric cars / engines / airplanes / rockets / satellites / trains / bridges / ships
bicycles / clocks / mirrors / lenses / telescopes / microscopes / cameras / radio / television / telephones
computers / the internet / web browsers / search engines / email / passwords / encryption / computer viruses
databases / operating systems / programming / algorithms / recursion / sorting / binary search / hash tables
linked lists / stacks / object-oriented programming / functional programming / unit tests / version control
machine learning / neural networks / robots / artificial intelligence / virtual reality / blockchain
cloud computing / open source / video games / numbers / prime numbers / fractions / percentages / algebra / geometry
triangles / circles / probability / statistics / averages / calculus / logic / infinity / zero / pi
the scientific method / evolution / genes / DNA / cells / photosynthesis / ecosystems / biodiversity / food chains
pollution / global warming / the ozone layer / the water cycle / fossils / history / ancient Egypt / ancient Greece
the Roman Empire / the Middle Ages / the Renaissance / the French Revolution / the Industrial Revolution
the First World War / the Second World War / the Cold War / democracy / human rights / slavery / the printing press
money / banks / inflation / taxes / interest rates / the stock market / budgets / saving money / debt / insurance
trade / supply and demand / small businesses / marketing / advertising / customer service / leadership / teamwork
time management / job interviews / a resume / public speaking / negotiation / learning a language / studying
reading / writing / poetry / novels / fairy tales / movies / theater / painting / sculpture / photography
architecture / music / the piano / the guitar / the violin / singing / dancing / jazz / classical music
Shakespeare / Mozart / Einstein / Newton / Darwin / Marie Curie / Leonardo da Vinci / Gandhi / Napoleon / Lincoln
Cleopatra / friendship / love / happiness / courage / kindness / honesty / patience / anger / fear / loneliness
hope / trust / forgiveness / families / children / parents / teachers / school / homework / university / travel
hotels / maps / camping / hiking / beaches / museums / London / Paris / New York / Tokyo / Rome / India / China
Brazil / Africa / Australia / the Amazon / Antarctica / Christmas / birthdays / weddings / holidays / traditions
religion / philosophy / ethics / law / police / elections / governments / newspapers / social media / privacy
fashion / furniture / cleaning / laundry / cooking / shopping
"""
_ABOUT = """
Why is {} important? / Why is {} important? Answer in a few sentences. / What is {}?
What are the main facts about {}? / What do you know about {}? / Explain {} to a child.
Explain {} in simple terms. / Explain {} in one sentence. / Explain {} in a few sentences. / Explain how {} works.
How does {} work? / Tell me about {}. / Tell me a story about {}. / Tell me a short story about {}.
Tell me a joke about {}. / Tell me something interesting about {}. / Write a poem about {}.
Write a short poem about {}. / Write a paragraph about {}. / Write an essay about {}. / Write an introduction to {}.
Write a letter to a friend about {}. / Write an email to my boss about {}.
Write a dialogue between two people about {}. / Write a slogan for {}. / Write three questions about {}.
Give me three tips about {}. / Give me five tips for {}. / Give me an example of {}. / Give me some advice about {}.
Give me a definition of {}. / List five facts about {}. / List ten words about {}. / List the advantages of {}.
List the pros and cons of {}. / Name three things about {}. / What are the benefits of {}?
What are the problems with {}? / What are some myths about {}? / What are some good books about {}?
What is the history of {}? / What is the best way to learn about {}? / What would happen without {}?
What makes {} special? / What is the difference between {} and {}? / Compare {} and {}. / How are {} and {} related?
Which is better, {} or {}? / How do I start with {}? / How can I learn more about {}?
How can I explain {} to my students? / How did {} begin? / How has {} changed over time? / How long has {} existed?
Who discovered {}? / Who knows the most about {}? / When did people first think about {}? / Where can I find {}?
Why do people like {}? / Why do people fear {}? / Why does {} matter? / Can you explain {}?
Can you help me with {}? / Can you tell me more about {}? / Is {} dangerous? / Is {} good for you? / Describe {}.
Describe {} in detail. / Summarize what is known about {}. / Summarize the topic of {} in three bullet points.
Describe {} as if you were a poet. / Define {}. / I want to learn about {}.
I am writing a report about {}. What should I include? / Let's talk about {}. / Imagine a world without {}.
Suggest a title for an article about {}. / Make a plan for a lesson about {}. / In your own words, what is {}?
Briefly, what is {}? / Step by step, explain {}. / Please write a quiz about {}.
Translate "I like {}" into French. / Translate "{} is important" into Spanish.
Translate "we talked about {}" into German. / Rewrite this sentence: I think that {} is very interesting.
Correct this sentence: {} are a important thing for peoples.
"""
_TASKS = """
adds two numbers / reverses a string / checks whether a number is prime / checks whether a word is a palindrome
counts the words in a text / counts the vowels in a string / finds the largest number in a list / sorts a list
removes duplicates from a list / computes the factorial of a number / computes Fibonacci numbers / reads a file
writes a list to a file / parses a date / converts Celsius to Fahrenheit / computes the average of a list
merges two dictionaries / merges two sorted lists / finds the common elements of two lists / flattens a nested list
shuffles a deck of cards / rolls a die / generates a random password / validates an email address
downloads a web page / counts the lines of a file / finds the longest word / groups words by length
prints a multiplication table / prints a triangle of stars / solves a quadratic equation
computes the greatest common divisor / converts a number to binary / checks whether brackets are balanced
implements a stack / implements a queue / implements binary search / implements bubble sort
implements a linked list / inverts a dictionary / transposes a matrix / computes a running sum
sums the digits of a number / rotates a list / splits a list into chunks / filters even numbers
capitalizes every word / replaces spaces with underscores / encrypts a text with the Caesar cipher
computes the distance between two points / checks whether a year is a leap year
converts seconds to hours and minutes / plays rock, paper, scissors / guesses a number / keeps a shopping list
stores contacts / logs messages with a timestamp / retries a failing function / measures the time of a function
caches results / draws a circle / simulates a bank account / simulates a traffic light
"""
_CODE = """
Write a Python function that {}. / Write a function in Python that {}. / Write a short Python script that {}.
Write a JavaScript function that {}. / Write a C function that {}. / Write a Java method that {}.
Write a class that {}. / In Python, how do I write code that {}? / Show me an example of a program that {}.
Explain how a program that {} works. / Write a Python function that {} and explain it.
Write unit tests for a function that {}. / Write pseudocode that {}.
"""
# One question in this many is only ever measured with.
_HELD_OUT_SHARE = 16


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for line in text.strip().splitlines() for part in line.split(" / "))


_FILLED = ((_parts(_ABOUT), _parts(_TOPICS), 0.8), (_parts(_CODE), _parts(_TASKS), 0.2))


def question(rng: np.random.Generator, *, held_out: bool = False) -> str:
    """Draws one; those that are held out and the others never meet."""
    while True:
        wordings, fillings, _ = _FILLED[rng.choice(len(_FILLED), p=[share for *_, share in _FILLED])]
        wording = wordings[rng.integers(len(wordings))]
        text = wording.format(*(fillings[rng.integers(len(fillings))] for _ in range(wording.count("{}"))))
        if is_held_out(text) == held_out:
            return text


def is_held_out(text: str) -> bool:
    """Whether a question is only measured with: a property of its text."""
    return hashlib.sha256(text.encode()).digest()[0] % _HELD_OUT_SHARE == 0
