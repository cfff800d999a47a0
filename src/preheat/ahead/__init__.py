"""Before traffic arrives: what an application needs is recorded, compiled ahead and proved complete."""
