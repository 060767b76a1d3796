"""The users of the broker that asks for a login. Each module of tests has its own, and what one may do concerns no other."""

USERS = {
    "ann": "canary-3fd9",
    "bob": "bob-password",
    "shop": "hunter2-canary",
    "app": "app-password",
    "mail": "mail-password",
    "native": "native-password",
    "other": "other-password",
    "clinic": "clinic-password",
    "service": "service-password",
    "spark": "spark-password",
}
