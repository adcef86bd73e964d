"""What the demo load asks: a shared system prompt, short questions, and passages to write about.

The passages are written for this project. In a long request the question stands before the passage, so that
two requests share the system prompt alone and each fills memory of its own.
"""

from __future__ import annotations

SYSTEM = (
    "You are a patient teacher in a small public library. Readers of every age come to your desk. "
    "Answer in plain words and whole sentences, give one example from daily life, and say so when you "
    "are not sure."
)

SHORT = (
    "Why does bread rise?",
    "What makes a rainbow?",
    "How do bees find their way home?",
    "Why is the sea salty?",
    "What does a lighthouse keeper do?",
    "How does a zip fastener work?",
    "Why do leaves change colour in autumn?",
    "What is the use of a library card?",
)

TASKS = (
    "Retell the following passage as a long story for a ten-year-old, with as many details as you can.",
    "Explain the following passage step by step to somebody who has never heard of it, at length.",
    "Write a long conversation between a grandmother and her grandson about the following passage.",
    "Continue the following passage with several paragraphs in the same tone.",
    "Write a detailed radio programme about the following passage, with an introduction and three parts.",
    "List everything that the following passage teaches, and discuss each point in a paragraph of its own.",
)

PASSAGES = (
    "A cooper fills a new barrel with water before it ever holds wine. The staves swell, the joints "
    "close, and by the next morning the floor beneath is dry. When the barrel is filled in earnest, a "
    "hand's breadth stays empty at the top. That space is called the ullage. Wine breathes through oak "
    "and shrinks in cold weather; it swells again in spring, and a barrel with no room to spare would "
    "push out its bung and weep along the seams. Each month the cellar master walks the rows with a "
    "lantern and a long spoon, tastes, listens to the sound of a knock on the wood, and tops up what "
    "has grown too empty. Too much air and the wine turns; too little and the barrel bursts. He writes "
    "nothing down. He knows the cellar as a shepherd knows his sheep.",
    "The night ferry leaves at a quarter past ten, when the last lorries have been chained to the deck. "
    "In the bridge the second mate reads the draught marks aloud, and the captain repeats them, because "
    "a number that has been said twice is seldom wrong. Beyond the mole the swell takes the ship and "
    "the cups begin to slide. A stabiliser fin, no larger than a barn door, tilts in the dark water "
    "below and holds the floor almost level. The cook, who has made this crossing four thousand times, "
    "ties his ladles to a rail and sleeps on the bench next to the oven. At three o'clock the lights of "
    "the other coast come up out of the sea, first a glow, then a line, then single lamps, and the "
    "gulls that slept on the aft rail lift off one after another.",
    "In a beehive nobody gives orders. A scout that has found a field of clover comes home and dances "
    "on the comb, a short run and a turn, a short run and a turn, and the direction of the run tells "
    "the others where to fly. If the field is rich she dances longer. If another scout has found a "
    "better one, the crowd around her grows smaller by itself. A bee that follows the dance goes out, "
    "looks, and dances in her turn or keeps silent. So the hive puts its workers where the nectar is "
    "without a plan and without a meeting. In a dry summer the same dance is made for water, and in "
    "spring, when half of the hive wants to leave, it is made for hollow trees, and then the scouts may "
    "argue for three days until all of them dance for the same one.",
    "The old bridge was built of chestnut wood by two brothers who did not speak to each other. Each "
    "began on his own bank. They had agreed on the height of the road and on the middle of the river, "
    "and on nothing else, so the eastern half has heavy beams set close together and the western half "
    "has light ones with wide diagonal braces. When the halves met, on a morning in May, they missed "
    "each other by the width of a thumb. The smith made an iron shoe to cover the joint, and it is "
    "still there. Engineers who came a hundred years later to measure the bridge found that both halves "
    "carried the same load. Children jump on the iron shoe for luck, because it rings, and the river "
    "below answers a moment later from under the stone of the western pier.",
    "A weather station on a mountain is a lonely post. The observer climbs up in October with flour, "
    "lamp oil and a sack of onions, and comes down in April. Six times a day he steps out to read the "
    "instruments, and often the instruments must be freed of rime with a wooden stick before there is "
    "anything to read. The thermometer hangs in a white box on legs, with slats that let the wind "
    "through and keep the sun out. He sends his figures down the valley by telegraph, five groups of "
    "five digits. On the maps of the capital they become one small circle with a feather on it. He has "
    "never seen such a map. But he knows that ships stay in harbour because of his digits, and so he "
    "goes out with the stick even when the door must be dug free from inside.",
    "Before there were refrigerators, ice was a harvest. In January the farmers swept the snow from the "
    "pond, scored the ice with a horse-drawn marker, and sawed it into blocks as heavy as a grown man. "
    "The blocks were floated down a channel of open water, pulled up a ramp, and stacked in a "
    "windowless house with double walls and sawdust in between. Packed close, with no air moving among "
    "them, they lasted until the next winter. A wagon went through the town each morning from May on. "
    "In the windows hung cards with the numbers twenty-five, fifty and a hundred, and the number that "
    "stood on top told the ice man how many pounds to carry in. Children ran behind the wagon for the "
    "splinters. In a warm winter the price doubled and the fishmongers went bankrupt.",
    "The typesetter stands in front of two cases, the capitals in the upper, the small letters in the "
    "lower, and that is where those letters have their names from. His right hand picks without his "
    "eyes; the box of the e is the largest and lies nearest, and the x lives far up in a corner. The "
    "letters are mirror images, and he reads them upside down, from left to right, as easily as others "
    "read a newspaper. When a line is almost full he must make it exactly full: thin slips of metal go "
    "between the words until the line stands firm in the stick. A page that is too loose falls apart on "
    "the way to the press. After printing, every letter goes back into its box, and an apprentice who "
    "drops one into the wrong box makes a fault that nobody will find for weeks.",
    "A small river delivers its own building material. In flood it carries gravel as large as fists, in "
    "summer only sand, and in a dry autumn not even that. On the outer side of a bend the water runs "
    "fast and eats the bank; on the inner side it runs slowly and lays down what it carries. So each "
    "bend wanders outward, year by year, until two bends touch and the river takes the short way. The "
    "old loop is cut off and becomes a lake in the shape of a sickle, with reeds, then with willows, "
    "then with a meadow that is wet in spring. Farmers who straightened the river with stone were "
    "surprised that it dug itself deeper, that their wells fell dry, and that the flood came to the "
    "town below in one night instead of three days. Now some of the stones are being taken out.",
)


def long_prompt(index: int) -> str:
    """The user text of the `index`-th long request; the first 48 differ from one another."""
    passage = PASSAGES[index % len(PASSAGES)]
    task = TASKS[(index % len(PASSAGES) + index // len(PASSAGES)) % len(TASKS)]
    return f"{task}\n\n{passage}"


def short_prompt(index: int) -> str:
    """The user text of the `index`-th short request."""
    return SHORT[index % len(SHORT)]
