from tests.unit.store.conftest import no_memory_left, no_thread_left, storage

__all__ = ["no_memory_left", "no_thread_left", "storage"]
