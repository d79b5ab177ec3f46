"""Opens the folder of weight versions that a specification names. Imports no torch."""

from services.common.fields import new_id
from services.common.stores import StoreFolder, is_url, join_url, open_folder, plain_path
from services.extras.stored_weights.layout import PROBE
from services.extras.stored_weights.local import LocalFolder


def open_versions(url: str) -> StoreFolder:
    """Returns the objects below a URL, or in a folder. Connects to nothing.

    Raises:
        FailedPreconditionError: If the URL is refused, or its package is not installed.
    """
    return open_folder(url) if is_url(url) else LocalFolder(plain_path(url))


def check_directory(directory: str) -> None:
    """Finds out whether this process can write, read and delete versions below a URL, or in a folder.

    Raises:
        ServiceError: If it cannot, with the store's cause.
    """
    check_writable(open_versions(join_url(directory, new_id(PROBE))))


def check_writable(folder: StoreFolder) -> None:
    """Writes, reads and deletes a small object.

    Raises:
        ServiceError: If one of these fails.
    """
    name = new_id(PROBE)
    folder.put(name, memoryview(b"slipstream"))
    try:
        folder.read(name)
    finally:
        folder.delete([name])
