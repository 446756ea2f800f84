"""`runner decide`: trains pairs with equal seeds, one seed after another, until it is known which setting is better."""
