"""From raw files to each client's samples: data sets, partition schemes and test splits."""
