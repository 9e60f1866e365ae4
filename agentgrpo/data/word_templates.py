"""The kinds of word problem: what is computed, and the wordings that ask for it.

Every kind has wordings for training and others that are only ever used to measure; both mean the
same, so that a held-out question tests reading, not a new kind of sum. In a wording and in `expr`
the letters {a} {b} {c} {d} are numbers, {n} and {m} two names, {t} things. Levels:

    1  sums said in signs or words, and stories with one operation or two easy ones
    2  other stories with two operations; brackets; numbers not in the order of their use
    3  three operations, larger numbers, shares, percentages, clock times
    4  powers, remainders, sums and sequences: a loop, or an expression few do by head

Levels 1 and 2 are told apart by what SmolLM2-135M-Instruct solves late in runs of 14 steps: of each
wording of level 1 at least a tenth of its samples, of most of level 2 none.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One computation and the ways to ask for it."""

    name: str
    level: int
    expr: str
    """The answer as a Python expression: a whole number whenever `where` holds."""
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    ranges: dict[str, tuple[int, int]] = field(
        default_factory=lambda: {"a": (10, 99), "b": (10, 99), "c": (10, 99)}
    )
    """Smallest and largest value of each number, drawn uniformly."""
    let: dict[str, str] = field(default_factory=dict)
    """Numbers that follow from the drawn ones, as Python expressions."""
    where: str = "True"
    """Values are drawn until this Python expression holds."""


TRAIN_NAMES = (
    "Tom",
    "Ana",
    "Li",
    "Sam",
    "Mia",
    "Raj",
    "Zoe",
    "Ben",
    "Eva",
    "Max",
    "Ida",
    "Leo",
    "Kim",
    "Jon",
    "Ada",
    "Gus",
)
HELDOUT_NAMES = (
    "Nora",
    "Omar",
    "Priya",
    "Felix",
    "Yuki",
    "Carlos",
    "Ingrid",
    "Tariq",
    "Wanda",
    "Hugo",
)
TRAIN_THINGS = (
    "apples",
    "pens",
    "books",
    "coins",
    "cards",
    "shells",
    "nuts",
    "stamps",
    "beads",
    "cups",
)
HELDOUT_THINGS = (
    "marbles",
    "lemons",
    "buttons",
    "pencils",
    "tickets",
    "candles",
    "plates",
    "stickers",
)

TWO = {"a": (10, 99), "b": (10, 99)}

LEVEL_1 = (
    Kind(
        name="product",
        level=1,
        expr="{a} * {b}",
        ranges=TWO,
        train=(
            "What is {a} * {b}?",
            "Multiply {a} by {b}.",
            "{n} has {a} boxes with {b} {t} each. How many {t} does {n} have?",
            "There are {a} bags. Each bag holds {b} {t}. How many {t} are there?",
            "{n} buys {a} {t} for {b} cents each. How many cents does {n} pay?",
            "{n} walks {a} km a day. How many km does {n} walk in {b} days?",
        ),
        heldout=(
            "Work out {a} * {b}.",
            "Find the product of {a} and {b}.",
            "There are {a} drawers and {b} {t} in every drawer. How many {t} are there?",
            "A shop sells {a} {t} a week. How many {t} does it sell in {b} weeks?",
        ),
    ),
    Kind(
        name="sum",
        level=1,
        expr="{a} + {b} + {c}",
        ranges={"a": (10, 999), "b": (10, 999), "c": (10, 999)},
        train=(
            "What is {a} + {b} + {c}?",
            "Add {a}, {b} and {c}.",
            "{n} found {a} {t} on Monday, {b} on Tuesday and {c} on Friday. How many {t} is that?",
            "{n} has {a} {t}, {m} has {b} and a friend has {c}. "
            "How many {t} do they have together?",
            "{a} red, {b} green and {c} blue {t} are in a box. How many {t} are in the box?",
        ),
        heldout=(
            "Work out {a} + {b} + {c}.",
            "What do {a}, {b} and {c} add up to?",
            "Three jars hold {a}, {b} and {c} {t}. How many {t} do the jars hold together?",
        ),
    ),
    Kind(
        name="difference",
        level=1,
        expr="{a} - {b}",
        ranges={"a": (100, 999), "b": (10, 999)},
        where="{a} > {b}",
        train=(
            "What is {a} - {b}?",
            "Start with {a} and take away {b}.",
            "{n} had {a} {t} and gave {b} of them to {m}. How many {t} does {n} have now?",
            "There were {a} {t} on the table and {b} fell off. How many {t} are left?",
            "A story has {a} pages. {n} has read {b}. How many pages are left?",
        ),
        heldout=(
            "Work out {a} - {b}.",
            "Subtract {b} from {a}.",
            "Of the {a} {t} in the shop, {b} were sold. How many {t} remain?",
            "{n} needs {a} {t} and has {b}. How many {t} are missing?",
        ),
    ),
    Kind(
        name="product_plus",
        level=1,
        expr="{a} * {b} + {c}",
        train=(
            "What is {a} * {b} + {c}?",
            "Compute {a} times {b} plus {c}.",
            "{n} has {a} boxes with {b} {t} each and finds {c} more. How many {t} does {n} have?",
            "There are {a} bags of {b} {t} and {c} loose {t} on the table. How many {t} in total?",
            "{n} buys {a} {t} for {b} cents each and a cake for {c} cents. "
            "How many cents does {n} pay?",
            "{n} makes {a} {t} a day for {b} days and then {c} more. How many {t} does {n} make?",
        ),
        heldout=(
            "Work out {a} * {b} + {c}.",
            "Multiply {a} by {b} and then add {c}.",
            "{n} fills {a} trays with {b} {t} each and has {c} more. How many {t} is that?",
            "A hall has {a} rows of {b} chairs and {c} chairs at the back. "
            "How many chairs are there?",
        ),
    ),
    Kind(
        name="product_minus",
        level=1,
        expr="{a} * {b} - {c}",
        train=(
            "What is {a} * {b} - {c}?",
            "Compute {a} times {b} minus {c}.",
        ),
        heldout=(
            "Work out {a} * {b} - {c}.",
            "Multiply {a} by {b} and then subtract {c}.",
        ),
    ),
    Kind(
        name="minus_plus",
        level=1,
        expr="{a} - {b} + {c}",
        where="{a} > {b}",
        train=(
            "What is {a} - {b} + {c}?",
            "Start with {a}, take away {b} and add {c}.",
            "{n} had {a} {t}, lost {b} and then got {c}. How many {t} now?",
            "A bus has {a} riders. {b} get off and {c} get on. How many riders are on the bus?",
            "{n} had {a} cents, spent {b} and earned {c}. How many cents does {n} have?",
            "A room held {a} people, {b} went out and {c} came in. How many people are inside?",
            "{n} picked {a} {t}, ate {b} and picked {c} again. How many {t} does {n} have?",
        ),
        heldout=(
            "Work out {a} - {b} + {c}.",
            "From {a} subtract {b}, then add {c}.",
            "There were {a} {t} in the basket. {n} took out {b}, and {m} put in {c}. "
            "How many {t} are in the basket?",
            "A library owned {a} maps, threw away {b} and bought {c}. "
            "How many maps does it own now?",
        ),
    ),
    Kind(
        name="triple_product",
        level=1,
        expr="{a} * {b} * {c}",
        train=(
            "What is {a} * {b} * {c}?",
            "Compute {a} times {b} times {c}.",
        ),
        heldout=(
            "Work out {a} * {b} * {c}.",
            "Find the product of {a}, {b} and {c}.",
        ),
    ),
)

LEVEL_2 = (
    Kind(
        name="boxes_less",
        level=2,
        expr="{a} * {b} - {c}",
        train=(
            "{n} has {a} boxes with {b} {t} each and gives away {c}. How many {t} are left?",
            "{a} bags hold {b} {t} each. {c} of the {t} are broken. How many are not broken?",
            "{n} made {a} {t} a day for {b} days and lost {c}. How many {t} does {n} have?",
        ),
        heldout=(
            "A store gets {a} crates of {b} {t} and sells {c}. How many {t} does it still have?",
            "{n} packs {a} trays with {b} {t} each, then {m} takes {c}. How many {t} remain?",
        ),
    ),
    Kind(
        name="boxes_in_boxes",
        level=2,
        expr="{a} * {b} * {c}",
        train=(
            "There are {a} shelves with {b} rows of {c} {t}. How many {t} in total?",
            "{n} sells {a} bags a day, each with {b} {t}. How many {t} does {n} sell in {c} days?",
            "{a} boxes hold {b} bags each, and each bag holds {c} {t}. How many {t} is that?",
        ),
        heldout=(
            "{a} trucks carry {b} crates each, with {c} {t} in every crate. "
            "How many {t} do they carry?",
            "A school has {a} floors with {b} rooms of {c} chairs. How many chairs does it have?",
        ),
    ),
    Kind(
        name="times_sum",
        level=2,
        expr="{a} * ({b} + {c})",
        train=(
            "Compute {a} * ({b} + {c}).",
            "What is {a} times the sum of {b} and {c}?",
            "Each of {a} children gets {b} red and {c} blue {t}. How many {t} are needed?",
        ),
        heldout=(
            "Work out {a} * ({b} + {c}).",
            "Multiply {a} by the sum of {b} and {c}.",
            "{a} trays each hold {b} small and {c} big {t}. How many {t} do they hold?",
        ),
    ),
    Kind(
        name="two_buyers",
        level=2,
        expr="({a} + {b}) * {c}",
        train=(
            "{n} buys {a} {t} and {m} buys {b} {t}. Each costs {c} cents. "
            "How many cents do they pay together?",
            "A class has {a} girls and {b} boys. Each child gets {c} {t}. How many {t} are needed?",
            "Compute ({a} + {b}) * {c}.",
        ),
        heldout=(
            "{n} needs {a} {t} and {m} needs {b}. They cost {c} cents apiece. "
            "What do they spend in total, in cents?",
            "{n} runs {a} minutes in the morning and {b} minutes in the evening, every day. "
            "How many minutes is that in {c} days?",
            "Add {a} and {b}, then multiply by {c}.",
        ),
    ),
    Kind(
        name="less_each",
        level=2,
        expr="({a} - {b}) * {c}",
        where="{a} > {b}",
        train=(
            "{n} earns {a} coins a day and spends {b} of them. How many coins does {n} save in "
            "{c} days?",
            "A bag had {a} {t}, but {b} were taken out. How many {t} are in {c} such bags?",
            "Compute ({a} - {b}) * {c}.",
        ),
        heldout=(
            "A shop sells {t} for {a} cents and pays {b} cents for each of them. "
            "How many cents does it gain on {c} {t}?",
            "A team had {a} players and lost {b}. How many players are in {c} such teams?",
            "Subtract {b} from {a}, then multiply by {c}.",
        ),
    ),
    Kind(
        name="change",
        level=2,
        expr="{p} - {a} * {b}",
        ranges={"a": (3, 30), "b": (11, 99), "c": (5, 400)},
        let={"p": "{a} * {b} + {c}"},
        train=(
            "{n} has {p} cents and buys {a} {t} for {b} cents each. How many cents are left?",
            "A roll has {p} cm of tape. {n} cuts {a} pieces of {b} cm. How many cm remain?",
            "What is {p} - {a} * {b}?",
        ),
        heldout=(
            "A purse holds {p} cents. {n} pays for {a} {t} at {b} cents each. "
            "How many cents stay in the purse?",
            "A tank holds {p} liters. {n} fills {a} buckets of {b} liters from it. "
            "How many liters are still in the tank?",
            "Work out {p} - {a} * {b}.",
        ),
    ),
    Kind(
        name="two_losses",
        level=2,
        expr="{a} - {b} - {c}",
        ranges={"a": (200, 999), "b": (10, 99), "c": (10, 99)},
        train=(
            "{n} has {a} cents and buys a cup for {b} cents and a pen for {c} cents. "
            "How many cents are left?",
            "A bag had {a} {t}. {n} took {b} and {m} took {c}. How many {t} are in the bag?",
        ),
        heldout=(
            "Of {a} {t}, {b} are red, {c} are blue and the others are green. How many are green?",
            "A train of {a} seats has {b} taken and {c} reserved. How many seats are free?",
        ),
    ),
    Kind(
        name="some_and_boxes",
        level=2,
        expr="{c} + {a} * {b}",
        train=(
            "{n} has {c} {t} and buys {a} bags of {b} {t}. How many {t} does {n} have now?",
            "A box holds {b} {t}. {n} has {a} boxes and {c} loose {t}. How many {t} does {n} have?",
        ),
        heldout=(
            "{n} got {c} {t} as a gift and then bought {a} packs of {b}. "
            "How many {t} did {n} end up with?",
            "A crate holds {b} {t}. {n} owns {a} crates and {c} single {t}. "
            "How many {t} does {n} own?",
        ),
    ),
    Kind(
        name="boxes_less_some",
        level=2,
        expr="{a} * {b} - {c}",
        train=(
            "{n} gave {c} {t} to {m} out of {a} bags with {b} {t} each. "
            "How many {t} does {n} still have?",
            "A box holds {b} {t}. {n} filled {a} boxes and dropped {c} {t}. How many are left?",
        ),
        heldout=(
            "{c} {t} were sold from a stock of {a} crates with {b} {t} each. "
            "How many {t} are in stock?",
            "A tray holds {b} {t}. {n} filled {a} trays, and {m} took {c}. How many {t} remain?",
        ),
    ),
)

LEVEL_3 = (
    Kind(
        name="two_orders",
        level=3,
        expr="{a} * {b} + {c} * {d}",
        ranges={"a": (10, 99), "b": (10, 99), "c": (10, 99), "d": (10, 99)},
        train=(
            "{n} buys {a} {t} at {b} cents each and {c} cakes at {d} cents each. "
            "How many cents is that in total?",
            "One hall has {a} rows of {b} seats, another {c} rows of {d}. How many seats in all?",
        ),
        heldout=(
            "A farmer plants {a} lines of {b} trees and {c} lines of {d} bushes. "
            "How many plants is that?",
            "{n} ran {b} meters {a} times and {d} meters {c} times. How many meters did {n} run?",
        ),
    ),
    Kind(
        name="two_orders_less",
        level=3,
        expr="{a} * {b} - {c} * {d}",
        ranges={"a": (30, 99), "b": (30, 99), "c": (10, 29), "d": (10, 29)},
        train=(
            "{n} picked {a} baskets of {b} {t} and sold {c} bags of {d}. How many {t} are left?",
            "What is {a} * {b} - {c} * {d}?",
        ),
        heldout=(
            "A yard of {a} by {b} meters has a pool of {c} by {d} meters. "
            "How many square meters of the yard are not pool?",
            "Work out {a} * {b} - {c} * {d}.",
        ),
    ),
    Kind(
        name="shared",
        level=3,
        expr="({p} - {c}) // {a}",
        ranges={"a": (4, 40), "b": (11, 99), "c": (10, 99)},
        let={"p": "{a} * {b} + {c}"},
        train=(
            "{n} has {p} {t}, keeps {c} and shares the rest equally among {a} friends. "
            "How many {t} does each friend get?",
            "{a} rides and a meal of {c} coins cost {p} coins. How many coins is one ride?",
        ),
        heldout=(
            "From {p} {t}, {c} are set aside and the others go into {a} equal piles. "
            "How many {t} are in a pile?",
            "A rope of {p} cm loses {c} cm and is then cut into {a} equal parts. "
            "How many cm long is a part?",
        ),
    ),
    Kind(
        name="percent_off",
        level=3,
        expr="{a} * {b} * (100 - {c}) // 100",
        ranges={"a": (4, 60), "b": (20, 500), "c": (5, 60)},
        where="{a} * {b} * {c} % 100 == 0 and {c} % 5 == 0",
        train=(
            "{n} buys {a} {t} at {b} cents each and gets {c} percent off the whole bill. "
            "How many cents does {n} pay?",
            "{a} bags of {b} {t} arrive and {c} percent of all the {t} are bad. How many are good?",
        ),
        heldout=(
            "A bill for {a} chairs at {b} dollars each is lowered by {c}%. What is the new total?",
            "There are {a} buses with {b} riders each; {c}% of all riders get off. "
            "How many riders stay?",
        ),
    ),
    Kind(
        name="average",
        level=3,
        expr="({a} + {b} + {c} + {d}) // 4",
        ranges={"a": (100, 999), "b": (100, 999), "c": (100, 999), "d": (100, 999)},
        where="({a} + {b} + {c} + {d}) % 4 == 0",
        train=(
            "What is the average of {a}, {b}, {c} and {d}?",
            "{n} counted {a}, {b}, {c} and {d} {t} on four days. How many {t} a day is that on "
            "average?",
        ),
        heldout=(
            "Find the mean of the numbers {a}, {b}, {c} and {d}.",
            "Four boxes weigh {a}, {b}, {c} and {d} grams. What does a box weigh on average?",
        ),
    ),
    Kind(
        name="clock",
        level=3,
        expr="({a} * 60 + {b}) * {c}",
        ranges={"a": (2, 9), "b": (1, 59), "c": (3, 60)},
        train=(
            "A film lasts {a} hours and {b} minutes. How many minutes do {c} showings last?",
            "{n} works {a} hours and {b} minutes a day. How many minutes is that in {c} days?",
        ),
        heldout=(
            "One lap takes {a} minutes and {b} seconds. How many seconds do {c} laps take?",
            "A machine runs {a} h {b} min per shift. How many minutes does it run in {c} shifts?",
        ),
    ),
    Kind(
        name="left_over",
        level=3,
        expr="{a} * {b} % {c}",
        ranges={"a": (11, 99), "b": (11, 99), "c": (7, 50)},
        where="{a} * {b} % {c} > 0",
        train=(
            "{n} empties {a} boxes of {b} {t} and fills bags of {c} {t}. "
            "How many {t} are left over when no more bag can be filled?",
            "What is the remainder when {a} * {b} is divided by {c}?",
        ),
        heldout=(
            "{a} crates of {b} {t} are repacked into full trays of {c}. "
            "How many {t} do not fit into a full tray?",
            "Divide {a} times {b} by {c}. What remains?",
        ),
    ),
    Kind(
        name="full_bags",
        level=3,
        expr="({a} + {b}) // {c}",
        ranges={"a": (100, 999), "b": (100, 999), "c": (7, 50)},
        train=(
            "{n} has {a} {t} and {m} has {b}. How many bags of {c} {t} can they fill together?",
            "How many times does {c} fit completely into {a} + {b}?",
        ),
        heldout=(
            "{a} red and {b} blue {t} go into boxes of {c}. How many boxes become full?",
            "{n} saves {a} dollars and {m} saves {b}. A game costs {c} dollars. "
            "How many games can they buy with all their money?",
        ),
    ),
)

LEVEL_4 = (
    Kind(
        name="doubling",
        level=4,
        expr="{a} * {b} ** {c}",
        ranges={"a": (2, 60), "b": (2, 5), "c": (5, 15)},
        train=(
            "{n} has {a} {t}. Every day the number is multiplied by {b}. "
            "How many {t} are there after {c} days?",
            "What is {a} times {b} to the power of {c}?",
        ),
        heldout=(
            "A colony of {a} cells grows {b}-fold each hour. How many cells are there after "
            "{c} hours?",
            "Start with {a} and multiply by {b} again and again, {c} times. What is the result?",
        ),
    ),
    Kind(
        name="power_remainder",
        level=4,
        expr="{a} ** {b} % {c}",
        ranges={"a": (3, 99), "b": (5, 40), "c": (7, 999)},
        train=(
            "What is the remainder when {a} to the power of {b} is divided by {c}?",
            "Compute {a} ** {b} modulo {c}.",
        ),
        heldout=(
            "Raise {a} to the power {b} and divide by {c}. What remains?",
            "What is left when {a}^{b} is divided by {c}?",
        ),
    ),
    Kind(
        name="sum_between",
        level=4,
        expr="sum(range({a}, {p} + 1))",
        ranges={"a": (10, 200), "b": (10, 400)},
        let={"p": "{a} + {b}"},
        train=(
            "What is the sum of all whole numbers from {a} to {p}?",
            "Pages {a} to {p} are missing. What is the sum of the missing page numbers?",
        ),
        heldout=(
            "Add every whole number from {a} up to and including {p}.",
            "Seats are numbered {a}, {a} + 1 and so on up to {p}. What do the seat numbers add "
            "up to?",
        ),
    ),
    Kind(
        name="sum_of_squares",
        level=4,
        expr="sum(i * i for i in range(1, {a} + 1))",
        ranges={"a": (8, 120)},
        train=(
            "What is the sum of the squares of the numbers from 1 to {a}?",
            "{n} builds squares of {t}: 1 by 1, 2 by 2 and so on up to {a} by {a}. "
            "How many {t} does {n} need for all of them?",
        ),
        heldout=(
            "Add the square numbers 1, 4, 9 and so on up to the square of {a}.",
            "A tower has {a} layers; layer k counted from the top has k times k bricks. "
            "How many bricks is that?",
        ),
    ),
    Kind(
        name="more_each_week",
        level=4,
        expr="sum({a} + {b} * i for i in range({c}))",
        ranges={"a": (10, 99), "b": (2, 30), "c": (6, 60)},
        train=(
            "{n} saves {a} coins in the first week and {b} more each week than the week before. "
            "How many coins has {n} after {c} weeks?",
            "The first row has {a} seats and every next row has {b} seats more. "
            "How many seats do {c} rows have?",
        ),
        heldout=(
            "{n} reads {a} pages on day 1 and each day {b} pages more than the day before. "
            "How many pages are read in {c} days?",
            "A list starts with {a} and grows by {b} from entry to entry. "
            "What is the sum of its first {c} entries?",
        ),
    ),
    Kind(
        name="doubling_gifts",
        level=4,
        expr="{a} + sum({b} * 2 ** i for i in range({c}))",
        ranges={"a": (10, 500), "b": (2, 30), "c": (5, 16)},
        train=(
            "{n} has {a} {t}. On day 1 {n} gets {b} more, and each next day twice as many as the "
            "day before. How many {t} does {n} have after {c} days?",
        ),
        heldout=(
            "A jar holds {a} {t}. {n} adds {b} {t} in the first hour and doubles the added amount "
            "every hour. How many {t} are in the jar after {c} hours?",
        ),
    ),
    Kind(
        name="multiples",
        level=4,
        expr="sum(1 for i in range({a}, {p} + 1) if i % {c} == 0)",
        ranges={"a": (10, 300), "b": (100, 900), "c": (3, 23)},
        let={"p": "{a} + {b}"},
        train=(
            "How many whole numbers from {a} to {p} can be divided by {c} without remainder?",
            "Houses are numbered {a} to {p}. How many house numbers are multiples of {c}?",
        ),
        heldout=(
            "Count the multiples of {c} among the numbers {a} to {p}, both included.",
            "Tickets carry the numbers {a} to {p}, and one wins if {c} divides its number. "
            "How many tickets win?",
        ),
    ),
    Kind(
        name="digit_sum",
        level=4,
        expr="sum(int(digit) for digit in str({a} ** {b}))",
        ranges={"a": (2, 99), "b": (5, 30)},
        train=(
            "What is the sum of the digits of {a} to the power of {b}?",
            "Compute {a} ** {b} and add up its digits.",
        ),
        heldout=(
            "Write out {a}^{b} in full. What do its digits add up to?",
            "Find the digit sum of {a} raised to the power {b}.",
        ),
    ),
)

KINDS = LEVEL_1 + LEVEL_2 + LEVEL_3 + LEVEL_4
