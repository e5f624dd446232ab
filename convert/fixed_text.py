"""A fixed text for comparing models: prose, talk, code, numbers and a list, as people give them to models.

It never changes: figures taken with it at different times can be compared. Its perplexity says little about a
model by itself, since it is short.
"""

from __future__ import annotations

__all__ = ["FIXED_TEXT"]

FIXED_TEXT = """\
The ferry left the harbour a little after six, when the lamps along the quay were still lit and the first vans
of the fish market had begun to reverse into their places. On the upper deck an old man in a blue coat was
counting the gulls. He had counted them every morning for eleven years, he said, and the number had never been
the same twice; there had been forty on Monday, and only seven on the day of the great storm.

"And what do you do with the numbers?" asked the girl beside him.

"I write them down. Someone may want to know one day. Most of what we know about the sea was written down by
people who had no idea what it would be good for."

She thought about this while the engine changed its tone and the lighthouse slid past. Water is strange, her
teacher had told the class: it is heaviest at four degrees, so a lake freezes from the top, and the fish spend
the winter below the ice. If ice sank, lakes would freeze from the bottom up, and there would be few fish left to
count gulls over. A cubic metre of water has a mass of 1,000 kilograms; the same volume of ice has about 917.

The history of measuring is a history of agreements. For centuries every town had its own foot and its own
pound, and a merchant who bought cloth in one and sold it in another had to know both. In 1791 the French academy
proposed a unit that belonged to nobody: one ten-millionth of the distance from the pole to the equator. Two
astronomers spent seven years measuring an arc between Dunkirk and Barcelona. Their result was short by about
0.2 millimetres, which is less than the thickness of a thumbnail, and the metre has kept that error ever since.

To compute a running mean without storing all values, keep the count and the mean so far:

    def running_mean(values):
        mean = 0.0
        for count, value in enumerate(values, start=1):
            mean += (value - mean) / count
            yield mean

    for one in running_mean([2, 4, 9]):
        print(f"{one:.2f}")

This prints 2.00, 3.00 and 5.00. The same idea works for the variance, if the sum of squared differences from the
current mean is updated with the old and the new mean at once. Subtracting two large sums at the end, as one might
be tempted to do, loses most of the digits when the mean is large compared with the spread.

Before you leave the house in winter, check the following:

1. The windows are closed and the heating is turned down, but not off, so that no pipe can freeze.
2. The kettle, the iron and the lamp on the desk are unplugged.
3. Somebody has a key. If nobody does, leave one with the neighbours on the second floor.
4. You have your ticket, your passport and something to read.

Question: A train travels 180 kilometres in two and a half hours, stops for thirty minutes, and then covers another
60 kilometres in an hour. What is its average speed over the whole journey?
Answer: It covers 180 + 60 = 240 kilometres in 2.5 + 0.5 + 1 = 4 hours, so its average speed is 60 kilometres per
hour. Without the stop it would have been 240 / 3.5, or roughly 68.6 kilometres per hour.

Bees tell each other where flowers are by dancing. The angle of the dance to the vertical is the angle of the
flight to the sun, and the length of each run is the distance, about one second for every kilometre. When the sun
moves, the dancer turns with it, although it is dark in the hive and she cannot see the sky. The ones that follow
her need not understand geometry any more than we have to understand muscles in order to walk. A swarm that looks
for a new home does something stranger still: several hundred scouts dance for different places, and those for a
poor place stop sooner, until nearly all of them agree. Nobody has counted the votes; the decision is simply what is
left when the doubtful ones have fallen silent.

By noon the ferry was back. The old man had written "23, wind from the west, one child" into his book, and closed it.
"""
