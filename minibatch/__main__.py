from minibatch.cli import main

raise SystemExit(main())
