"""Makes files and folders that are complete or absent, and manifests that say what belongs to a folder."""
