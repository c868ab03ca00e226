"""The small world that the families talk about."""

PEOPLE = (
    "Ada Ben Cleo Dan Eva Finn Gita Hugo Iris Jon Kira Leo Mona Nils Olga Pablo Rosa Sam Tara Uma Vera Will Yara Zoe "
    "Amir Bella Carl Dora Emil Fay Glen Hana Ivan Jade Kofi Lena Max Nora Otto Pia Quinn Ravi Sofia Tom Ulla Victor "
    "Wanda Xena Yusuf Zara"
).split()

THINGS = (
    "apples pears plums lemons eggs cakes pies rolls books pens pencils cards coins stamps shells stones beads "
    "buttons ribbons bricks planks nails tiles bottles jars cups plates spoons candles lamps roses tulips seeds "
    "bulbs tickets badges marbles kites balls dolls"
).split()

CONTAINERS = "bags boxes crates baskets packs trays sacks drawers".split()

PLACES = "market school library harbour station garden museum bakery workshop farm".split()
