"""Reading labelled data and heads: files, folders, and datasets of the hub."""

from mergeway.data.files import base_settings as base_settings
from mergeway.data.files import read_data as read_data
from mergeway.data.files import read_head as read_head
from mergeway.data.files import read_jsonl as read_jsonl
from mergeway.data.files import read_npz as read_npz
from mergeway.data.hub import read_hub as read_hub
