"""What a converted dataset holds beside its pictures: index, columns, shards, what was left out."""
