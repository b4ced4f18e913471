"""The durable side of a trunk: its journal, its snapshots on disk, and the lock of its one writer."""

from mergeway.store.journal import Journal as Journal
from mergeway.store.journal import Record as Record
from mergeway.store.layout import Store as Store
