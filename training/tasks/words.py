"""Own lists of names, places and things; and invented ones, so that copying can't be learnt by heart."""

from pathlib import Path

from training.tasks.draw import Draw, Pool, words

FIRST = words(
    """Ada Aldo Alma Amir Anja Arlo Asta Bela Beno Birgit Bruno Cara Celia Clara Dario Dana Dilan Edda Elif
    Elmo Emil Enzo Erna Esra Fabio Fay Fiona Flora Franka Gino Greta Gus Hana Hilda Hugo Ida Igor Ilse
    Ilka Iris Ivo Jana Jonas Juno Kai Kira Klara Lara Leif Lena Leo Lina Livia Luca Mara Marek Mila
    Mina Mona Nadia Nico Nils Nora Olga Omar Oskar Otto Paula Pia Quinn Rafa Rena Rosa Ruben Runa Sami
    Selma Silas Sofia Sven Tara Theo Tilda Tomas Ugo Ulla Uma Vera Viktor Wanda Willem Xenia Yara Yusuf
    Zara Zeno Agnes Boris Cyril Doris Edgar Frida Gerda Henry Jasper Keira Lotte Magnus Noel Orla Petra
    Ralph Stella Timo Ursula Vito Wilma"""
)
LAST = words(
    """Abel Adler Alder Amsel Arden Bauer Beck Berg Birch Blum Boyle Brandt Brook Bruun Carver Cole Crane Dahl
    Dorn Drake Eden Ekberg Ellis Falk Fenn Fisk Frost Garner Glass Graf Haas Hale Harp Heller Holm Horn
    Ibsen Ives Jansen Jarl Kane Keller Kern Klein Kohl Krag Lang Lark Lind Lorenz Lund Mann Marsh Meier
    Mohr Moss Nash Neumann Noble North Novak Olsen Orlov Page Park Penn Pike Pohl Quist Raab Reed
    Rhodes Rossi Ruiz Sand Schell Seidel Sharp Stahl Stone Storm Strand Tanner Thorn Tran Ulrich Vance
    Vega Vogel Wagner Ward Webb Weiss Wolf York Young Zander Ziegler Bishop Carter Dalton Emerson
    Foster Griffin Hobbs Jensen Kramer Lowell Mercer Nolan Osborn"""
)
CITIES = words(
    """Bergen Oslo Turin Lyon Porto Lisbon Madrid Vienna Graz Zurich Basel Geneva Prague Brno Warsaw Krakow
    Riga Vilnius Tallinn Helsinki Turku Malmo Uppsala Aarhus Odense Hamburg Bremen Leipzig Dresden
    Munich Mainz Ghent Bruges Leiden Utrecht Delft Dublin Cork Galway Leeds York Bristol Oxford Perth
    Cairo Tunis Rabat Dakar Accra Lagos Nairobi Kampala Lima Quito Bogota Santiago Cordoba Rosario
    Denver Austin Boston Seattle Portland Tampa Omaha Toronto Calgary Halifax Tokyo Osaka Kyoto Seoul
    Busan Taipei Hanoi Delhi Mumbai Pune Chennai Colombo Sydney Hobart Auckland Athens Sofia Split
    Zagreb Ljubljana Bari Pisa Siena Verona Nantes Lille Nice Malaga Seville Bilbao Funchal Reykjavik"""
)
COUNTRIES = words(
    """Norway Italy France Portugal Spain Austria Switzerland Czechia Poland Latvia Lithuania Estonia Finland
    Sweden Denmark Germany Belgium Netherlands Ireland Egypt Tunisia Morocco Senegal Ghana Nigeria
    Kenya Uganda Peru Ecuador Colombia Chile Argentina Canada Japan Vietnam India Australia Greece
    Bulgaria Croatia Slovenia Iceland"""
)
COLOURS = words(
    "red blue green yellow black white grey brown purple orange pink teal silver gold violet cyan beige"
)
NOUNS = words(
    """anchor apple arrow badge barrel basin basket beacon bell belt bench bolt book bottle box brick bridge
    broom brush bucket cabin cable camera candle canoe card cart chain chair chest clamp clock coat
    coil compass cord crate crown cup cushion desk dial door drawer drill drum engine fan fence file
    filter flag flask folder fork frame funnel garden gate gear glove hammer handle harbor hat helmet
    hinge hook horn jacket jar kettle key kite knob ladder lamp lantern latch lens lever lid lock
    magnet map mask meter mirror mixer motor nail needle nest net nozzle oven paddle pan panel pedal
    pencil pillow pipe plate plug pocket pole pump rack radio rail ramp razor reel ribbon ring rod roof
    rope ruler saddle sail saw scale screen seat shaft shelf shovel signal sink socket sofa spade spool
    spoon spring stamp stool stove strap switch table tank tent tile tire torch tower towel tray trunk
    tube tunnel turbine valve vase wagon wallet wheel whistle window wire wrench yacht zipper"""
)
ADJECTIVES = words(
    """amber brave bright broad calm clean clever cold cool crisp deep dry eager early empty exact fair fast
    fine firm flat fresh full gentle grand hard heavy hollow huge keen large late lean light little
    long loose loud low main mild narrow neat new noble old open outer pale plain proud pure quick
    quiet rapid rare rich ripe rough round sharp short silent simple slim slow small smooth soft solid
    spare steady steep stiff strong sweet swift tall thick thin tidy tiny upper vast warm wide wild
    wise young"""
)
PROPERTIES = words(
    """count size weight height width length depth price cost rate speed level limit total score rank index
    volume power voltage pressure angle age distance range load length_limit capacity quantity balance
    budget""",
    10,
)
LABELS = words(
    """name title label code owner author editor sender receiver supplier brand model city origin target
    source region branch team group category kind material maker status_text location address_line
    contact note_title""",
    10,
)
FLAGS = words(
    """active paid open closed urgent verified locked visible enabled public private ready sold broken empty
    full approved archived fragile insured signed shipped online wireless organic seasonal insulated
    refundable""",
    10,
)
PRODUCTS = words(
    """desk_lamp steel_bottle wool_scarf garden_hose tea_kettle oak_table wall_clock rain_jacket phone_case
    bread_knife coffee_mug yoga_mat bike_pump picture_frame paper_tray door_mat tool_box camping_stove
    fishing_rod guitar_strap piano_stool leather_belt travel_pillow snow_shovel plant_pot sun_hat
    ink_pen copper_pan glass_vase floor_mop paint_brush hand_saw water_filter bath_towel book_shelf
    beach_ball chess_set card_holder candle_stick soap_dish"""
)
JOBS = words(
    """baker carpenter chemist clerk cook dentist designer driver editor engineer farmer florist gardener
    geologist guide historian jeweller judge lawyer librarian mason mechanic miner musician nurse
    optician painter pharmacist physicist pilot plumber porter printer sailor sculptor singer surgeon
    tailor teacher translator vet waiter welder"""
)
FOODS = words(
    """apples bananas beans beets bread butter cabbage carrots cheese cherries corn dates eggs figs garlic
    ginger grapes honey kale leeks lemons lentils lettuce limes mangoes melons milk mushrooms noodles
    nuts oats olives onions oranges pasta peaches pears peas peppers plums potatoes radishes raisins
    rice salt spinach squash sugar tomatoes"""
)
TAGS = words(
    """alpha beta gamma delta draft final urgent review legacy stable local remote summer winter spring autumn
    travel sport music science history nature kitchen garden office school family budget health design
    weekend holiday"""
)
# Common lower-case words of the corpus: a model has to learn how each is spelt without the space before it.
VOCABULARY = Pool(Path(__file__).with_name("vocabulary.txt").read_text(encoding="utf-8").split())
MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_STARTS = words("b br c ch d dr f fl g gr h j k kr l m n p pr qu r s sh st t th tr v w z")
_VOWELS = words("a e i o u ai ea ou")
_ENDS = words("n r l s m d k t nd rk lm st x ss th")
# Two consonant starts that no training name has: names built with them are new in every letter group.
_NEW_STARTS = ("sk", "sw")


def invented_word(draw: Draw) -> str:
    """A pronounceable word that is in no dictionary, in lower case."""
    starts = _NEW_STARTS if draw.heldout and draw.chance(0.3) else _STARTS
    parts = [draw.pick(starts), draw.pick(_VOWELS)]
    for _ in range(draw.integer(0, 1)):
        parts += [draw.pick(_STARTS), draw.pick(_VOWELS)]
    return "".join(parts) + draw.pick(_ENDS)


def proper_name(draw: Draw) -> str:
    """A capitalised invented word."""
    return invented_word(draw).capitalize()


def person(draw: Draw) -> str:
    """First and last name; a third of them is invented."""
    first = proper_name(draw) if draw.chance(0.15) else draw.of(FIRST)
    last = proper_name(draw) if draw.chance(0.25) else draw.of(LAST)
    return f"{first} {last}"


def city(draw: Draw) -> str:
    """A city, one in four invented."""
    return proper_name(draw) if draw.chance(0.25) else draw.of(CITIES)


def code(draw: Draw) -> str:
    """An identifier such as `KT-4821`."""
    letters = "".join(draw.pick("ABCDEFGHKLMNPRSTVWXZ") for _ in range(draw.integer(1, 3)))
    return f"{letters}{draw.pick(('-', '', '_'))}{draw.integer(10, 99999)}"


def date(draw: Draw) -> str:
    """An ISO date."""
    return f"{draw.integer(1990, 2039)}-{draw.integer(1, 12):02d}-{draw.integer(1, 28):02d}"


def clock(draw: Draw) -> str:
    """A time of day, as 07:45."""
    return f"{draw.integer(0, 23):02d}:{draw.pick((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def noun(draw: Draw) -> str:
    """A thing's name, or any common word."""
    return draw.of(VOCABULARY if draw.chance(0.35) else NOUNS)


def word(draw: Draw) -> str:
    """A lower-case word, common or invented."""
    return draw.of(VOCABULARY) if draw.chance(0.6) else invented_word(draw)


def thing(draw: Draw) -> str:
    """A noun with an adjective, as `bright lamp`, or two common words."""
    if draw.chance(0.3):
        return f"{draw.of(VOCABULARY)} {draw.of(VOCABULARY)}"
    return f"{draw.of(ADJECTIVES)} {draw.of(NOUNS)}"
