"""The orders in which Holistic CMM's released code takes classes and domains; it keeps those of MagMax's code, which it is built on.

A number is a class's place in the dataset's own order. Cars and both Office datasets come in that order as they are.
"""

from __future__ import annotations

_HUNDRED = """
70 89 11 13 63 53 86 57 41 43 14 98 52 73 95 96 33 16 39 74 25 88 35 28 79 82 72 4 30 17 59 97 36 38 29 55 83 7 22 48 19 47 2 44
67 71 34 84 6 46 61 8 80 10 49 15 68 9 99 40 27 45 51 37 21 64 92 24 60 31 5 91 93 90 65 66 77 20 58 62 23 76 75 42 0 26 87 50 3
56 81 1 94 69 18 78 54 12 85 32
"""
_TWO_HUNDRED = """
186 157 67 59 117 1 122 14 131 40 66 199 92 170 197 118 173 37 146 191 4 198 64 56 51 165 0 107 175 148 187 161 137 180 133 181
177 12 20 74 143 142 110 116 194 138 183 89 45 121 190 94 36 83 130 120 21 38 125 145 182 103 105 61 32 141 13 112 111 104 26 69
39 156 147 108 72 10 96 188 16 63 152 86 160 119 184 7 172 132 44 42 82 15 114 127 85 168 55 65 3 95 171 176 33 43 17 97 163 62
75 123 128 124 99 29 28 166 41 35 76 77 5 84 102 60 78 70 164 113 30 91 81 18 155 179 73 46 80 31 150 79 174 153 50 144 9 167 134
135 101 49 106 154 23 100 48 25 71 139 162 158 159 87 90 11 24 57 19 52 129 140 178 53 169 195 126 47 151 136 22 58 34 8 185 54
109 193 68 192 149 115 98 88 93 6 196 189 2 27
"""
_CLASSES = {"cifar100": _HUNDRED, "cub-200": _TWO_HUNDRED, "imagenet-r": _TWO_HUNDRED}
_DOMAINS = {
    "domainnet": "clipart sketch real infograph quickdraw painting",
    "imagenet-r-domains": (
        "tattoo sketch graphic painting art origami sculpture graffiti cartoon misc toy embroidery videogame sticker deviantart"
    ),
}


def class_order(dataset: str, classes: int) -> list[int]:
    """The released order of a dataset's classes; its own where none was released, or for another number of classes."""
    order = [int(number) for number in _CLASSES.get(dataset, "").split()]
    return order if len(order) == classes else list(range(classes))


def domain_order(dataset: str) -> list[str]:
    """The released order of a dataset's domains; empty where they come by their names."""
    return _DOMAINS.get(dataset, "").split()
