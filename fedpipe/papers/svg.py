"""Figures as the text of an SVG, and as a part of a page, cleaned of what could act."""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

SVG_NAMESPACE = "http://www.w3.org/2000/svg"
XLINK_NAMESPACE = "http://www.w3.org/1999/xlink"
DROPPED_ELEMENTS = {"metadata", "style", "title"}  #: elements of a figure that a page has no use for
FORBIDDEN_ELEMENTS = {"script", "foreignObject", "iframe", "a"}  #: elements that a figure must not have
REFERENCE_PATTERN = re.compile(r"(?:^|\()#([^)]+)")  #: from one element of a figure to another: #name, or url(#name)


@dataclass(frozen=True)
class SvgFigure:
    """A figure: the text of its SVG, its numbers as CSV, whether they are of generated data, and what is not in it."""

    svg: str
    csv: str
    is_generated: bool = False
    missing: str = ""


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """An SVG as a part of a page: with names of its own, and without what could act or ask for something.

    Elements keep their names only where something refers to them: two that look the same have the same one.

    Raises
    ------
    ValueError
        It holds a script or the like, or refers to something outside.
    """
    root = ElementTree.fromstring(svg)
    if root.tag != f"{{{SVG_NAMESPACE}}}svg":
        raise ValueError("a figure should be an SVG.")
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in DROPPED_ELEMENTS:
                parent.remove(child)
    for element in root.iter():
        if element.tag.rpartition("}")[2] in FORBIDDEN_ELEMENTS:
            raise ValueError(f"a figure can't have the element {element.tag.rpartition('}')[2]}.")
        for name, value in element.attrib.items():
            element.set(name, _clean_attribute(name, value, prefix))
    referenced_ids = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for name in REFERENCE_PATTERN.findall(value)
    }
    for element in root.iter():
        if element.get("id") not in referenced_ids:
            element.attrib.pop("id", None)
    root.set("role", "img")
    root.set("aria-label", label)
    root.attrib.pop("width", None)
    root.attrib.pop("height", None)
    ElementTree.register_namespace("", SVG_NAMESPACE)
    ElementTree.register_namespace("xlink", XLINK_NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode")


def _clean_attribute(name: str, value: str, prefix: str) -> str:
    local = name.rpartition("}")[2]
    if local.lower().startswith("on"):
        raise ValueError(f"a figure can't have the attribute {local}.")
    if local == "id":
        return prefix + value
    if local in {"href", "src"}:
        if value.startswith("#"):
            return f"#{prefix}{value[1:]}"
        if value.startswith("data:image/png"):
            return value
        raise ValueError(f"a figure can't refer to {value[:60]!r}.")
    if re.search(r"url\((?!#)", value):
        raise ValueError(f"a figure can't refer to {value[:60]!r}.")
    return value.replace("url(#", f"url(#{prefix}")
