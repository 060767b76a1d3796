"""The library's tables, at revision 0008."""

from django.db.migrations import Migration as DjangoMigration

from dualwrite.django.migrations import Revision


class Migration(DjangoMigration):  # type: ignore[misc] # Django ships no types
    """The first one."""

    initial = True
    operations = (Revision("0008"),)
