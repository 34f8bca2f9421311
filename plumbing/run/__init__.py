"""What a run needs: settings, its folder, results, provenance, files, errors, seeding, devices, payloads."""
