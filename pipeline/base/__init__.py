"""The base that every wing uses: errors, processes, launch, waiting for storage, files, metrics. Imports no wing."""
