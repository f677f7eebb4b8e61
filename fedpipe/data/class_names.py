"""Names of the classes of each data set. Results do not depend on them, so they are in no key."""

from __future__ import annotations

from collections.abc import Sequence

from fedpipe.core.storage import layout
from fedpipe.data import store

DIGITS = "0 1 2 3 4 5 6 7 8 9"
#: The published class names of each data set, in label order.
CLASS_NAMES = {
    "digits": DIGITS,
    "mnist": DIGITS,
    "fashion_mnist": "T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle_boot",
    "cifar10": "airplane automobile bird cat deer dog frog horse ship truck",
    "cifar100": """
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """,
    "imdb": "negative positive",
    "ag_news": "World Sports Business Sci/Tech",
}


def read_class_names_or_numbers(dataset: str, count: int) -> tuple[str, ...]:
    """Class names of a stored data set, or the class numbers if it has no names.

    Parameters
    ----------
    dataset
        Name of the stored data set, such as ``digits-0123456789ab``.
    count
        Number of classes C.
    """
    path = layout.get_dataset_path(dataset)
    return select_class_names(dataset.rpartition("-")[0], count, store.read_class_names(path))


def select_class_names(component_name: str, count: int, own_names: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the first ``count`` classes of a data set: published names, ``own_names`` of its labels, or numbers."""
    published_names = [name.replace("_", " ") for name in CLASS_NAMES.get(component_name, "").split()]
    names = published_names or own_names
    return tuple(names[:count]) if len(names) >= count else tuple(map(str, range(count)))
