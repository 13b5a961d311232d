"""State and loop of elastic training, for all frameworks."""

from ringdance.training.elastic import (
    HostUpdateResult,
    NotificationManager,
    ObjectState,
    State,
    notification_manager,
    run_fn,
)

__all__ = [
    "HostUpdateResult", "ObjectState", "State", "WorkerNotificationManager", "notification_manager", "run_fn",
]

WorkerNotificationManager = NotificationManager
