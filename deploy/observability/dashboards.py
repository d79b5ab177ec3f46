"""The four dashboards."""

from deploy.observability.run_dashboards import OVERVIEW, STALENESS
from deploy.observability.system_dashboards import FLEET, WEIGHT_SYNC

ALL = (OVERVIEW, STALENESS, WEIGHT_SYNC, FLEET)
