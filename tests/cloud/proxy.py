from tests.cloud.storages import Seen  # noqa: F401
from tests.cloud.storages import Storage as Proxy  # noqa: F401
