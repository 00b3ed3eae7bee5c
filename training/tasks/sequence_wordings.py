"""How people ask for copying, ordering and looking up."""

from training.tasks.draw import lines

COPY = lines(
    """Repeat the text exactly.
    Copy this text.
    Write the text below again, word for word.
    Echo this back unchanged.
    Return the following text as it is.
    Say exactly this:
    Output the text without any change.
    Reproduce the passage.
    Copy the following.
    Print this again."""
)
REVERSE = lines(
    """Reverse this list.
    Write the list backwards.
    Give the items in reverse order.
    Turn the order of the lines around.
    List these from last to first.
    Reverse the order.
    Last item first, please."""
)
SORT_WORDS = lines(
    """Sort these words.
    Put the words in alphabetical order.
    Order the list from a to z.
    Sort alphabetically.
    Arrange the words by the alphabet.
    Give the list in alphabetical order."""
)
SORT_NUMBERS = lines(
    """Sort these numbers.
    Order the numbers from small to large.
    Put the numbers in ascending order.
    Sort from smallest to largest.
    Arrange the numbers, smallest first.
    Give the numbers in rising order."""
)
UNIQUE = lines(
    """Remove repeated lines.
    Keep each item once, in the order of first appearance.
    List every different item once.
    Drop the duplicates.
    Which different items are there? Keep their order.
    Delete what occurs twice."""
)
COUNT = lines(
    """How many items are in the list?
    Count the lines.
    How many entries are there?
    Give the number of items.
    Count the items below.
    How long is this list?"""
)
LOOKUP = lines(
    """What is the value of {0}?
    Look up {0}.
    Which value belongs to {0}?
    Give the value for {0}.
    Find {0} and return its value.
    What does {0} map to?
    {0}?
    Return what is stored under {0}.
    I need the entry for {0}.
    Tell me the value of {0}."""
)
NTH = lines(
    """Give line {0}.
    What is on line {0}?
    Return line number {0}.
    Which item is number {0}?
    Copy only line {0}.
    Show entry {0} of the list."""
)
QUOTE = lines(
    """Quote the sentence that contains "{0}".
    Which sentence has the word "{0}"? Copy it.
    Find the sentence with "{0}" and repeat it.
    Copy the sentence in which "{0}" occurs.
    Give the sentence with "{0}" word for word."""
)
COMPACT = lines(
    """Write this JSON without spaces and line breaks.
    Minify this JSON.
    Put the JSON on one line without spaces.
    Compact this JSON.
    Remove the white space from this JSON."""
)
INDENT = lines(
    """Indent this JSON by two spaces.
    Pretty-print this JSON with two spaces.
    Format the JSON with an indent of two.
    Make this JSON readable, two spaces a level.
    Reformat the JSON over several lines, indent 2."""
)
