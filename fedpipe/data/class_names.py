"""Names of the classes of each data set. Results do not depend on them, so they are in no key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpipe.core.components import pinned_files

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


def get_class_names(dataset_settings: Mapping[str, Any], count: int) -> tuple[str, ...]:
    """Class names of a data set, or the class numbers if it has no names.

    Parameters
    ----------
    dataset_settings
        Name and parameters of the data set. The class names of a ``folder`` are read from its path.
    count
        Number of classes C.
    """
    class_names = [name.replace("_", " ") for name in CLASS_NAMES.get(dataset_settings["name"], "").split()]
    root = (
        Path(dataset_settings["path"]) if dataset_settings["name"] == "folder" and "path" in dataset_settings else None
    )
    if root and pinned_files.compute_content_sha256(root) == dataset_settings.get("sha256"):
        if levels := [*dataset_settings.get("levels", ())]:
            pattern = "/".join("*" for _ in levels[: levels.index("label") + 1])
            class_names = sorted({path.name for path in root.glob(pattern) if path.is_dir()})
        else:
            split_folders = [root / split for split in ("train", "test") if (root / split).is_dir()] or [root]
            class_names = sorted(path.name for path in split_folders[0].iterdir() if path.is_dir())
    return tuple(class_names) if len(class_names) == count else tuple(map(str, range(count)))
