#define rand	pan_rand
#define pthread_equal(a,b)	((a)==(b))
#if defined(HAS_CODE) && defined(VERBOSE)
	#ifdef BFS_PAR
		bfs_printf("Pr: %d Tr: %d\n", II, t->forw);
	#else
		cpu_printf("Pr: %d Tr: %d\n", II, t->forw);
	#endif
#endif
	switch (t->forw) {
	default: Uerror("bad forward move");
	case 0:	/* if without executable clauses */
		continue;
	case 1: /* generic 'goto' or 'skip' */
		IfNotBlocked
		_m = 3; goto P999;
	case 2: /* generic 'else' */
		IfNotBlocked
		if (trpt->o_pm&1) continue;
		_m = 3; goto P999;

		 /* PROC Watch */
	case 3: // STATE 1 - refit.pml:333 - [(((!(r_gate_closed[0])&&!((((r_bits[0]==0)&&(version==0))||((r_bits[0]==2)&&(version==1)))))||(!(r_gate_closed[1])&&!((((r_bits[1]==0)&&(version==0))||((r_bits[1]==2)&&(version==1)))))))] (4:0:0 - 1)
		IfNotBlocked
		reached[4][1] = 1;
		if (!((( !(((int)now.r_gate_closed[0]))&& !((((((int)now.r_bits[0])==0)&&(((int)now.version)==0))||((((int)now.r_bits[0])==2)&&(((int)now.version)==1)))))||( !(((int)now.r_gate_closed[1]))&& !((((((int)now.r_bits[1])==0)&&(((int)now.version)==0))||((((int)now.r_bits[1])==2)&&(((int)now.version)==1))))))))
			continue;
		/* merge: assert(0)(0, 2, 4) */
		reached[4][2] = 1;
		spin_assert(0, "0", II, tt, t);
		/* merge: .(goto)(0, 5, 4) */
		reached[4][5] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 4: // STATE 7 - refit.pml:335 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[4][7] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC :init: */
	case 5: // STATE 1 - refit.pml:324 - [(run Receiver(0))] (0:0:0 - 1)
		IfNotBlocked
		reached[3][1] = 1;
		if (!(addproc(II, 1, 1, 0, 0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 6: // STATE 2 - refit.pml:324 - [(run Receiver(1))] (0:0:0 - 1)
		IfNotBlocked
		reached[3][2] = 1;
		if (!(addproc(II, 1, 1, 1, 0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 7: // STATE 3 - refit.pml:324 - [(run Coordinator(0))] (0:0:0 - 1)
		IfNotBlocked
		reached[3][3] = 1;
		if (!(addproc(II, 1, 2, 0, 0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 8: // STATE 5 - refit.pml:325 - [(run Coordinator(1))] (0:0:0 - 1)
		IfNotBlocked
		reached[3][5] = 1;
		if (!(addproc(II, 1, 2, 1, 0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 9: // STATE 6 - refit.pml:326 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[3][6] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC Coordinator */
	case 10: // STATE 1 - refit.pml:226 - [epoch = (epoch+1)] (0:50:4 - 1)
		IfNotBlocked
		reached[2][1] = 1;
		(trpt+1)->bup.ovals = grab_ints(4);
		(trpt+1)->bup.ovals[0] = ((int)now.epoch);
		now.epoch = (((int)now.epoch)+1);
#ifdef VAR_RANGES
		logval("epoch", ((int)now.epoch));
#endif
		;
		/* merge: my_epoch = epoch(50, 2, 50) */
		reached[2][2] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->my_epoch);
		((P2 *)_this)->my_epoch = ((int)now.epoch);
#ifdef VAR_RANGES
		logval("Coordinator:my_epoch", ((int)((P2 *)_this)->my_epoch));
#endif
		;
		/* merge: revision = (revision+1)(50, 3, 50) */
		reached[2][3] = 1;
		(trpt+1)->bup.ovals[2] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: old = bound(50, 4, 50) */
		reached[2][4] = 1;
		(trpt+1)->bup.ovals[3] = ((int)((P2 *)_this)->old);
		((P2 *)_this)->old = ((int)now.bound);
#ifdef VAR_RANGES
		logval("Coordinator:old", ((int)((P2 *)_this)->old));
#endif
		;
		_m = 3; goto P999; /* 3 */
	case 11: // STATE 6 - refit.pml:228 - [((old!=0))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][6] = 1;
		if (!((((int)((P2 *)_this)->old)!=0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 12: // STATE 7 - refit.pml:111 - [((((bound==old)&&!(obsolete))&&(version==0)))] (32:0:2 - 1)
		IfNotBlocked
		reached[2][7] = 1;
		if (!((((((int)now.bound)==((int)((P2 *)_this)->old))&& !(((int)now.obsolete)))&&(((int)now.version)==0))))
			continue;
		/* merge: obsolete = 1(32, 8, 32) */
		reached[2][8] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.obsolete);
		now.obsolete = 1;
#ifdef VAR_RANGES
		logval("obsolete", ((int)now.obsolete));
#endif
		;
		/* merge: revision = (revision+1)(32, 9, 32) */
		reached[2][9] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: .(goto)(32, 13, 32) */
		reached[2][13] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 13: // STATE 13 - refit.pml:114 - [.(goto)] (0:32:0 - 2)
		IfNotBlocked
		reached[2][13] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 14: // STATE 11 - refit.pml:112 - [(1)] (32:0:0 - 1)
		IfNotBlocked
		reached[2][11] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(32, 13, 32) */
		reached[2][13] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 15: // STATE 16 - refit.pml:121 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][16] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 16: // STATE 17 - refit.pml:123 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][17] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 17: // STATE 18 - refit.pml:126 - [((r_attempt[i]==old))] (25:0:1 - 1)
		IfNotBlocked
		reached[2][18] = 1;
		if (!((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])==((int)((P2 *)_this)->old))))
			continue;
		/* merge: r_obsolete[i] = 1(25, 19, 25) */
		reached[2][19] = 1;
		(trpt+1)->bup.oval = ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_obsolete[Coordinator:i]", ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(25, 23, 25) */
		reached[2][23] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 18: // STATE 23 - refit.pml:129 - [.(goto)] (0:25:0 - 2)
		IfNotBlocked
		reached[2][23] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 19: // STATE 21 - refit.pml:127 - [(1)] (25:0:0 - 1)
		IfNotBlocked
		reached[2][21] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(25, 23, 25) */
		reached[2][23] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 20: // STATE 25 - refit.pml:131 - [(((r_attempt[i]!=old)||!(r_writing[i])))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][25] = 1;
		if (!(((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])!=((int)((P2 *)_this)->old))|| !(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 21: // STATE 26 - refit.pml:133 - [i = (i+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][26] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 22: // STATE 33 - refit.pml:232 - [((version==1))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][33] = 1;
		if (!((((int)now.version)==1)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 23: // STATE 34 - refit.pml:232 - [attempt = committed] (0:0:1 - 1)
		IfNotBlocked
		reached[2][34] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->attempt);
		((P2 *)_this)->attempt = ((int)now.committed);
#ifdef VAR_RANGES
		logval("Coordinator:attempt", ((int)((P2 *)_this)->attempt));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 24: // STATE 36 - refit.pml:233 - [((version==0))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][36] = 1;
		if (!((((int)now.version)==0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 25: // STATE 37 - refit.pml:233 - [answered[old] = (version==0)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][37] = 1;
		(trpt+1)->bup.oval = ((int)now.answered[ Index(((int)((P2 *)_this)->old), 4) ]);
		now.answered[ Index(((P2 *)_this)->old, 4) ] = (((int)now.version)==0);
#ifdef VAR_RANGES
		logval("answered[Coordinator:old]", ((int)now.answered[ Index(((int)((P2 *)_this)->old), 4) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 26: // STATE 41 - refit.pml:236 - [((version==1))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][41] = 1;
		if (!((((int)now.version)==1)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 27: // STATE 42 - refit.pml:236 - [attempt = committed] (0:0:1 - 1)
		IfNotBlocked
		reached[2][42] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->attempt);
		((P2 *)_this)->attempt = ((int)now.committed);
#ifdef VAR_RANGES
		logval("Coordinator:attempt", ((int)((P2 *)_this)->attempt));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 28: // STATE 52 - refit.pml:244 - [((attempts==3))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][52] = 1;
		if (!((((int)now.attempts)==3)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 29: // STATE 58 - refit.pml:249 - [((attempts<3))] (78:0:2 - 1)
		IfNotBlocked
		reached[2][58] = 1;
		if (!((((int)now.attempts)<3)))
			continue;
		/* merge: attempts = (attempts+1)(78, 59, 78) */
		reached[2][59] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.attempts);
		now.attempts = (((int)now.attempts)+1);
#ifdef VAR_RANGES
		logval("attempts", ((int)now.attempts));
#endif
		;
		/* merge: attempt = attempts(78, 60, 78) */
		reached[2][60] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->attempt);
		((P2 *)_this)->attempt = ((int)now.attempts);
#ifdef VAR_RANGES
		logval("Coordinator:attempt", ((int)((P2 *)_this)->attempt));
#endif
		;
		/* merge: .(goto)(78, 64, 78) */
		reached[2][64] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 30: // STATE 66 - refit.pml:255 - [((!((epoch==my_epoch))||(version==1)))] (247:0:1 - 1)
		IfNotBlocked
		reached[2][66] = 1;
		if (!(( !((((int)now.epoch)==((int)((P2 *)_this)->my_epoch)))||(((int)now.version)==1))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: my_epoch */  (trpt+1)->bup.oval = ((P2 *)_this)->my_epoch;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->my_epoch = 0;
		/* merge: goto done(0, 67, 247) */
		reached[2][67] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 31: // STATE 77 - refit.pml:262 - [.(goto)] (0:101:1 - 1)
		IfNotBlocked
		reached[2][77] = 1;
		;
		/* merge: ok = 1(101, 79, 101) */
		reached[2][79] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->ok);
		((P2 *)_this)->ok = 1;
#ifdef VAR_RANGES
		logval("Coordinator:ok", ((int)((P2 *)_this)->ok));
#endif
		;
		_m = 3; goto P999; /* 1 */
	case 32: // STATE 69 - refit.pml:257 - [mixed = (!(admitted)||0)] (0:101:8 - 1)
		IfNotBlocked
		reached[2][69] = 1;
		(trpt+1)->bup.ovals = grab_ints(8);
		(trpt+1)->bup.ovals[0] = ((int)((P2 *)_this)->mixed);
		((P2 *)_this)->mixed = ( !(((int)now.admitted))||0);
#ifdef VAR_RANGES
		logval("Coordinator:mixed", ((int)((P2 *)_this)->mixed));
#endif
		;
		/* merge: bound = attempt(101, 70, 101) */
		reached[2][70] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.bound);
		now.bound = ((int)((P2 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("bound", ((int)now.bound));
#endif
		;
		/* merge: bound_epoch = my_epoch(101, 71, 101) */
		reached[2][71] = 1;
		(trpt+1)->bup.ovals[2] = ((int)bound_epoch);
		bound_epoch = ((int)((P2 *)_this)->my_epoch);
#ifdef VAR_RANGES
		logval("bound_epoch", ((int)bound_epoch));
#endif
		;
		/* merge: obsolete = 0(101, 72, 101) */
		reached[2][72] = 1;
		(trpt+1)->bup.ovals[3] = ((int)now.obsolete);
		now.obsolete = 0;
#ifdef VAR_RANGES
		logval("obsolete", ((int)now.obsolete));
#endif
		;
		/* merge: admitted = 1(101, 73, 101) */
		reached[2][73] = 1;
		(trpt+1)->bup.ovals[4] = ((int)now.admitted);
		now.admitted = 1;
#ifdef VAR_RANGES
		logval("admitted", ((int)now.admitted));
#endif
		;
		/* merge: revision = (revision+1)(101, 74, 101) */
		reached[2][74] = 1;
		(trpt+1)->bup.ovals[5] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: seen = revision(101, 75, 101) */
		reached[2][75] = 1;
		(trpt+1)->bup.ovals[6] = ((int)((P2 *)_this)->seen);
		((P2 *)_this)->seen = ((int)now.revision);
#ifdef VAR_RANGES
		logval("Coordinator:seen", ((int)((P2 *)_this)->seen));
#endif
		;
		/* merge: .(goto)(101, 77, 101) */
		reached[2][77] = 1;
		;
		/* merge: ok = 1(101, 79, 101) */
		reached[2][79] = 1;
		(trpt+1)->bup.ovals[7] = ((int)((P2 *)_this)->ok);
		((P2 *)_this)->ok = 1;
#ifdef VAR_RANGES
		logval("Coordinator:ok", ((int)((P2 *)_this)->ok));
#endif
		;
		_m = 3; goto P999; /* 8 */
	case 33: // STATE 80 - refit.pml:139 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][80] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 34: // STATE 81 - refit.pml:141 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][81] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 35: // STATE 82 - refit.pml:145 - [((seen<=r_revision[i]))] (98:0:2 - 1)
		IfNotBlocked
		reached[2][82] = 1;
		if (!((((int)((P2 *)_this)->seen)<=((int)now.r_revision[ Index(((int)((P2 *)_this)->i), 2) ]))))
			continue;
		/* merge: ok = 0(98, 83, 98) */
		reached[2][83] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)((P2 *)_this)->ok);
		((P2 *)_this)->ok = 0;
#ifdef VAR_RANGES
		logval("Coordinator:ok", ((int)((P2 *)_this)->ok));
#endif
		;
		/* merge: .(goto)(98, 93, 98) */
		reached[2][93] = 1;
		;
		/* merge: i = (i+1)(98, 95, 98) */
		reached[2][95] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 99, 98) */
		reached[2][99] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 36: // STATE 93 - refit.pml:159 - [.(goto)] (0:98:1 - 3)
		IfNotBlocked
		reached[2][93] = 1;
		;
		/* merge: i = (i+1)(98, 95, 98) */
		reached[2][95] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 99, 98) */
		reached[2][99] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 37: // STATE 84 - refit.pml:147 - [(r_writing[i])] (98:0:2 - 1)
		IfNotBlocked
		reached[2][84] = 1;
		if (!(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))
			continue;
		/* merge: ok = 0(98, 85, 98) */
		reached[2][85] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)((P2 *)_this)->ok);
		((P2 *)_this)->ok = 0;
#ifdef VAR_RANGES
		logval("Coordinator:ok", ((int)((P2 *)_this)->ok));
#endif
		;
		/* merge: .(goto)(98, 93, 98) */
		reached[2][93] = 1;
		;
		/* merge: i = (i+1)(98, 95, 98) */
		reached[2][95] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 99, 98) */
		reached[2][99] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 38: // STATE 86 - refit.pml:149 - [(((seen>r_revision[i])&&!(r_writing[i])))] (98:0:6 - 1)
		IfNotBlocked
		reached[2][86] = 1;
		if (!(((((int)((P2 *)_this)->seen)>((int)now.r_revision[ Index(((int)((P2 *)_this)->i), 2) ]))&& !(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		/* merge: r_attempt[i] = attempt(98, 87, 98) */
		reached[2][87] = 1;
		(trpt+1)->bup.ovals = grab_ints(6);
		(trpt+1)->bup.ovals[0] = ((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_attempt[ Index(((P2 *)_this)->i, 2) ] = ((int)((P2 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("r_attempt[Coordinator:i]", ((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: r_revision[i] = seen(98, 88, 98) */
		reached[2][88] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.r_revision[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_revision[ Index(((P2 *)_this)->i, 2) ] = ((int)((P2 *)_this)->seen);
#ifdef VAR_RANGES
		logval("r_revision[Coordinator:i]", ((int)now.r_revision[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: r_mixed[i] = mixed(98, 89, 98) */
		reached[2][89] = 1;
		(trpt+1)->bup.ovals[2] = ((int)now.r_mixed[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_mixed[ Index(((P2 *)_this)->i, 2) ] = ((int)((P2 *)_this)->mixed);
#ifdef VAR_RANGES
		logval("r_mixed[Coordinator:i]", ((int)now.r_mixed[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: r_open[i] = 0(98, 90, 98) */
		reached[2][90] = 1;
		(trpt+1)->bup.ovals[3] = ((int)now.r_open[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_open[ Index(((P2 *)_this)->i, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_open[Coordinator:i]", ((int)now.r_open[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: r_obsolete[i] = 0(98, 91, 98) */
		reached[2][91] = 1;
		(trpt+1)->bup.ovals[4] = ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_obsolete[Coordinator:i]", ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(98, 93, 98) */
		reached[2][93] = 1;
		;
		/* merge: i = (i+1)(98, 95, 98) */
		reached[2][95] = 1;
		(trpt+1)->bup.ovals[5] = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 99, 98) */
		reached[2][99] = 1;
		;
		_m = 3; goto P999; /* 8 */
	case 39: // STATE 102 - refit.pml:266 - [(ok)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][102] = 1;
		if (!(((int)((P2 *)_this)->ok)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: ok */  (trpt+1)->bup.oval = ((P2 *)_this)->ok;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->ok = 0;
		_m = 3; goto P999; /* 0 */
	case 40: // STATE 103 - refit.pml:166 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][103] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 41: // STATE 104 - refit.pml:168 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][104] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 42: // STATE 105 - refit.pml:171 - [(((r_attempt[i]==attempt)&&!(r_obsolete[i])))] (116:0:3 - 1)
		IfNotBlocked
		reached[2][105] = 1;
		if (!(((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])==((int)((P2 *)_this)->attempt))&& !(((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		/* merge: r_gate_closed[i] = 1(116, 106, 116) */
		reached[2][106] = 1;
		(trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((int)now.r_gate_closed[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_gate_closed[ Index(((P2 *)_this)->i, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_gate_closed[Coordinator:i]", ((int)now.r_gate_closed[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: r_open[i] = 1(116, 107, 116) */
		reached[2][107] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.r_open[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_open[ Index(((P2 *)_this)->i, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_open[Coordinator:i]", ((int)now.r_open[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(116, 111, 116) */
		reached[2][111] = 1;
		;
		/* merge: i = (i+1)(116, 113, 116) */
		reached[2][113] = 1;
		(trpt+1)->bup.ovals[2] = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 117, 116) */
		reached[2][117] = 1;
		;
		_m = 3; goto P999; /* 5 */
	case 43: // STATE 111 - refit.pml:174 - [.(goto)] (0:116:1 - 2)
		IfNotBlocked
		reached[2][111] = 1;
		;
		/* merge: i = (i+1)(116, 113, 116) */
		reached[2][113] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 117, 116) */
		reached[2][117] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 44: // STATE 109 - refit.pml:172 - [(1)] (116:0:1 - 1)
		IfNotBlocked
		reached[2][109] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(116, 111, 116) */
		reached[2][111] = 1;
		;
		/* merge: i = (i+1)(116, 113, 116) */
		reached[2][113] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 117, 116) */
		reached[2][117] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 45: // STATE 124 - refit.pml:270 - [(((r_completed[0]==attempt)&&(r_completed[1]==attempt)))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][124] = 1;
		if (!(((((int)now.r_completed[0])==((int)((P2 *)_this)->attempt))&&(((int)now.r_completed[1])==((int)((P2 *)_this)->attempt)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 46: // STATE 130 - refit.pml:274 - [seen = revision] (0:154:2 - 1)
		IfNotBlocked
		reached[2][130] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)((P2 *)_this)->seen);
		((P2 *)_this)->seen = ((int)now.revision);
#ifdef VAR_RANGES
		logval("Coordinator:seen", ((int)((P2 *)_this)->seen));
#endif
		;
		/* merge: unknown = 0(154, 131, 154) */
		reached[2][131] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->unknown);
		((P2 *)_this)->unknown = 0;
#ifdef VAR_RANGES
		logval("Coordinator:unknown", ((int)((P2 *)_this)->unknown));
#endif
		;
		_m = 3; goto P999; /* 1 */
	case 47: // STATE 132 - refit.pml:277 - [(((version==1)&&(committed==attempt)))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][132] = 1;
		if (!(((((int)now.version)==1)&&(((int)now.committed)==((int)((P2 *)_this)->attempt)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 48: // STATE 133 - refit.pml:277 - [(1)] (179:0:0 - 1)
		IfNotBlocked
		reached[2][133] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(179, 155, 179) */
		reached[2][155] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 49: // STATE 155 - refit.pml:288 - [.(goto)] (0:179:0 - 2)
		IfNotBlocked
		reached[2][155] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 50: // STATE 134 - refit.pml:278 - [(((version==1)&&(committed!=attempt)))] (247:0:1 - 1)
		IfNotBlocked
		reached[2][134] = 1;
		if (!(((((int)now.version)==1)&&(((int)now.committed)!=((int)((P2 *)_this)->attempt)))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: attempt */  (trpt+1)->bup.oval = ((P2 *)_this)->attempt;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->attempt = 0;
		/* merge: goto done(0, 135, 247) */
		reached[2][135] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 51: // STATE 136 - refit.pml:279 - [(((version==0)&&!((epoch==my_epoch))))] (247:0:1 - 1)
		IfNotBlocked
		reached[2][136] = 1;
		if (!(((((int)now.version)==0)&& !((((int)now.epoch)==((int)((P2 *)_this)->my_epoch))))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: my_epoch */  (trpt+1)->bup.oval = ((P2 *)_this)->my_epoch;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->my_epoch = 0;
		/* merge: goto done(0, 137, 247) */
		reached[2][137] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 52: // STATE 138 - refit.pml:280 - [((((version==0)&&(epoch==my_epoch))&&((bound!=attempt)||obsolete)))] (206:0:0 - 1)
		IfNotBlocked
		reached[2][138] = 1;
		if (!((((((int)now.version)==0)&&(((int)now.epoch)==((int)((P2 *)_this)->my_epoch)))&&((((int)now.bound)!=((int)((P2 *)_this)->attempt))||((int)now.obsolete)))))
			continue;
		/* merge: goto recover(0, 139, 206) */
		reached[2][139] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 53: // STATE 140 - refit.pml:281 - [(((((version==0)&&(epoch==my_epoch))&&(bound==attempt))&&!(obsolete)))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][140] = 1;
		if (!(((((((int)now.version)==0)&&(((int)now.epoch)==((int)((P2 *)_this)->my_epoch)))&&(((int)now.bound)==((int)((P2 *)_this)->attempt)))&& !(((int)now.obsolete)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 54: // STATE 141 - refit.pml:55 - [assert((version==0))] (0:179:3 - 1)
		IfNotBlocked
		reached[2][141] = 1;
		spin_assert((((int)now.version)==0), "(version==0)", II, tt, t);
		/* merge: assert(!(answered[attempt]))(179, 142, 179) */
		reached[2][142] = 1;
		spin_assert( !(((int)now.answered[ Index(((int)((P2 *)_this)->attempt), 4) ])), " !(answered[attempt])", II, tt, t);
		/* merge: assert(((r_completed[0]==attempt)&&(r_bits[0]==2)))(179, 143, 179) */
		reached[2][143] = 1;
		spin_assert(((((int)now.r_completed[0])==((int)((P2 *)_this)->attempt))&&(((int)now.r_bits[0])==2)), "((r_completed[0]==attempt)&&(r_bits[0]==2))", II, tt, t);
		/* merge: assert(((r_completed[1]==attempt)&&(r_bits[1]==2)))(179, 144, 179) */
		reached[2][144] = 1;
		spin_assert(((((int)now.r_completed[1])==((int)((P2 *)_this)->attempt))&&(((int)now.r_bits[1])==2)), "((r_completed[1]==attempt)&&(r_bits[1]==2))", II, tt, t);
		/* merge: version = 1(179, 145, 179) */
		reached[2][145] = 1;
		(trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((int)now.version);
		now.version = 1;
#ifdef VAR_RANGES
		logval("version", ((int)now.version));
#endif
		;
		/* merge: committed = attempt(179, 146, 179) */
		reached[2][146] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.committed);
		now.committed = ((int)((P2 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("committed", ((int)now.committed));
#endif
		;
		/* merge: revision = (revision+1)(179, 147, 179) */
		reached[2][147] = 1;
		(trpt+1)->bup.ovals[2] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: .(goto)(179, 153, 179) */
		reached[2][153] = 1;
		;
		/* merge: .(goto)(179, 155, 179) */
		reached[2][155] = 1;
		;
		_m = 3; goto P999; /* 8 */
	case 55: // STATE 153 - refit.pml:287 - [.(goto)] (0:179:0 - 3)
		IfNotBlocked
		reached[2][153] = 1;
		;
		/* merge: .(goto)(179, 155, 179) */
		reached[2][155] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 56: // STATE 149 - refit.pml:284 - [unknown = 1] (0:0:1 - 1)
		IfNotBlocked
		reached[2][149] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->unknown);
		((P2 *)_this)->unknown = 1;
#ifdef VAR_RANGES
		logval("Coordinator:unknown", ((int)((P2 *)_this)->unknown));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 57: // STATE 150 - refit.pml:284 - [(run LateCommit(seen,attempt))] (0:0:1 - 1)
		IfNotBlocked
		reached[2][150] = 1;
		if (!(addproc(II, 1, 0, ((int)((P2 *)_this)->seen), ((int)((P2 *)_this)->attempt))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: seen */  (trpt+1)->bup.oval = ((P2 *)_this)->seen;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->seen = 0;
		_m = 3; goto P999; /* 0 */
	case 58: // STATE 151 - refit.pml:285 - [unknown = 1] (0:179:1 - 1)
		IfNotBlocked
		reached[2][151] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->unknown);
		((P2 *)_this)->unknown = 1;
#ifdef VAR_RANGES
		logval("Coordinator:unknown", ((int)((P2 *)_this)->unknown));
#endif
		;
		/* merge: .(goto)(179, 153, 179) */
		reached[2][153] = 1;
		;
		/* merge: .(goto)(179, 155, 179) */
		reached[2][155] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 59: // STATE 157 - refit.pml:290 - [(unknown)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][157] = 1;
		if (!(((int)((P2 *)_this)->unknown)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: unknown */  (trpt+1)->bup.oval = ((P2 *)_this)->unknown;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P2 *)_this)->unknown = 0;
		_m = 3; goto P999; /* 0 */
	case 60: // STATE 158 - refit.pml:111 - [((((bound==attempt)&&!(obsolete))&&(version==0)))] (176:0:2 - 1)
		IfNotBlocked
		reached[2][158] = 1;
		if (!((((((int)now.bound)==((int)((P2 *)_this)->attempt))&& !(((int)now.obsolete)))&&(((int)now.version)==0))))
			continue;
		/* merge: obsolete = 1(176, 159, 176) */
		reached[2][159] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.obsolete);
		now.obsolete = 1;
#ifdef VAR_RANGES
		logval("obsolete", ((int)now.obsolete));
#endif
		;
		/* merge: revision = (revision+1)(176, 160, 176) */
		reached[2][160] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: .(goto)(176, 164, 176) */
		reached[2][164] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 61: // STATE 164 - refit.pml:114 - [.(goto)] (0:176:0 - 2)
		IfNotBlocked
		reached[2][164] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 62: // STATE 162 - refit.pml:112 - [(1)] (176:0:0 - 1)
		IfNotBlocked
		reached[2][162] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(176, 164, 176) */
		reached[2][164] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 63: // STATE 167 - refit.pml:294 - [(((version==1)&&(committed==attempt)))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][167] = 1;
		if (!(((((int)now.version)==1)&&(((int)now.committed)==((int)((P2 *)_this)->attempt)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 64: // STATE 168 - refit.pml:294 - [(1)] (196:0:0 - 1)
		IfNotBlocked
		reached[2][168] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(0, 175, 196) */
		reached[2][175] = 1;
		;
		/* merge: .(goto)(0, 180, 196) */
		reached[2][180] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 65: // STATE 169 - refit.pml:295 - [(((version==1)&&(committed!=attempt)))] (246:0:0 - 1)
		IfNotBlocked
		reached[2][169] = 1;
		if (!(((((int)now.version)==1)&&(((int)now.committed)!=((int)((P2 *)_this)->attempt)))))
			continue;
		/* merge: goto lost(0, 170, 246) */
		reached[2][170] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 66: // STATE 171 - refit.pml:296 - [((version==0))] (206:0:1 - 1)
		IfNotBlocked
		reached[2][171] = 1;
		if (!((((int)now.version)==0)))
			continue;
		/* merge: answered[attempt] = 1(206, 172, 206) */
		reached[2][172] = 1;
		(trpt+1)->bup.oval = ((int)now.answered[ Index(((int)((P2 *)_this)->attempt), 4) ]);
		now.answered[ Index(((P2 *)_this)->attempt, 4) ] = 1;
#ifdef VAR_RANGES
		logval("answered[Coordinator:attempt]", ((int)now.answered[ Index(((int)((P2 *)_this)->attempt), 4) ]));
#endif
		;
		/* merge: goto recover(206, 173, 206) */
		reached[2][173] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 67: // STATE 181 - refit.pml:182 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][181] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 68: // STATE 182 - refit.pml:184 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][182] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 69: // STATE 183 - refit.pml:188 - [(((((r_attempt[i]==attempt)&&(version==1))&&(r_completed[i]==committed))&&!(r_writing[i])))] (193:0:2 - 1)
		IfNotBlocked
		reached[2][183] = 1;
		if (!(((((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])==((int)((P2 *)_this)->attempt))&&(((int)now.version)==1))&&(((int)now.r_completed[ Index(((int)((P2 *)_this)->i), 2) ])==((int)now.committed)))&& !(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		/* merge: r_gate_closed[i] = 0(193, 184, 193) */
		reached[2][184] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.r_gate_closed[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_gate_closed[ Index(((P2 *)_this)->i, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_gate_closed[Coordinator:i]", ((int)now.r_gate_closed[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(193, 188, 193) */
		reached[2][188] = 1;
		;
		/* merge: i = (i+1)(193, 190, 193) */
		reached[2][190] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 194, 193) */
		reached[2][194] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 70: // STATE 188 - refit.pml:194 - [.(goto)] (0:193:1 - 2)
		IfNotBlocked
		reached[2][188] = 1;
		;
		/* merge: i = (i+1)(193, 190, 193) */
		reached[2][190] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 194, 193) */
		reached[2][194] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 71: // STATE 186 - refit.pml:192 - [(1)] (193:0:1 - 1)
		IfNotBlocked
		reached[2][186] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(193, 188, 193) */
		reached[2][188] = 1;
		;
		/* merge: i = (i+1)(193, 190, 193) */
		reached[2][190] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 194, 193) */
		reached[2][194] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 72: // STATE 198 - refit.pml:111 - [((((bound==attempt)&&!(obsolete))&&(version==0)))] (223:0:2 - 1)
		IfNotBlocked
		reached[2][198] = 1;
		if (!((((((int)now.bound)==((int)((P2 *)_this)->attempt))&& !(((int)now.obsolete)))&&(((int)now.version)==0))))
			continue;
		/* merge: obsolete = 1(223, 199, 223) */
		reached[2][199] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.obsolete);
		now.obsolete = 1;
#ifdef VAR_RANGES
		logval("obsolete", ((int)now.obsolete));
#endif
		;
		/* merge: revision = (revision+1)(223, 200, 223) */
		reached[2][200] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: .(goto)(223, 204, 223) */
		reached[2][204] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 73: // STATE 204 - refit.pml:114 - [.(goto)] (0:223:0 - 2)
		IfNotBlocked
		reached[2][204] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 74: // STATE 202 - refit.pml:112 - [(1)] (223:0:0 - 1)
		IfNotBlocked
		reached[2][202] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(223, 204, 223) */
		reached[2][204] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 75: // STATE 207 - refit.pml:121 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][207] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 76: // STATE 208 - refit.pml:123 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][208] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 77: // STATE 209 - refit.pml:126 - [((r_attempt[i]==attempt))] (216:0:1 - 1)
		IfNotBlocked
		reached[2][209] = 1;
		if (!((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])==((int)((P2 *)_this)->attempt))))
			continue;
		/* merge: r_obsolete[i] = 1(216, 210, 216) */
		reached[2][210] = 1;
		(trpt+1)->bup.oval = ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_obsolete[Coordinator:i]", ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(216, 214, 216) */
		reached[2][214] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 78: // STATE 214 - refit.pml:129 - [.(goto)] (0:216:0 - 2)
		IfNotBlocked
		reached[2][214] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 79: // STATE 212 - refit.pml:127 - [(1)] (216:0:0 - 1)
		IfNotBlocked
		reached[2][212] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(216, 214, 216) */
		reached[2][214] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 80: // STATE 216 - refit.pml:131 - [(((r_attempt[i]!=attempt)||!(r_writing[i])))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][216] = 1;
		if (!(((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])!=((int)((P2 *)_this)->attempt))|| !(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 81: // STATE 217 - refit.pml:133 - [i = (i+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][217] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 82: // STATE 224 - refit.pml:310 - [(((version==1)&&(committed==attempt)))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][224] = 1;
		if (!(((((int)now.version)==1)&&(((int)now.committed)==((int)((P2 *)_this)->attempt)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 83: // STATE 230 - refit.pml:121 - [i = 0] (0:0:1 - 1)
		IfNotBlocked
		reached[2][230] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 84: // STATE 231 - refit.pml:123 - [((i<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][231] = 1;
		if (!((((int)((P2 *)_this)->i)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 85: // STATE 232 - refit.pml:126 - [((r_attempt[i]==attempt))] (239:0:1 - 1)
		IfNotBlocked
		reached[2][232] = 1;
		if (!((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])==((int)((P2 *)_this)->attempt))))
			continue;
		/* merge: r_obsolete[i] = 1(239, 233, 239) */
		reached[2][233] = 1;
		(trpt+1)->bup.oval = ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]);
		now.r_obsolete[ Index(((P2 *)_this)->i, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_obsolete[Coordinator:i]", ((int)now.r_obsolete[ Index(((int)((P2 *)_this)->i), 2) ]));
#endif
		;
		/* merge: .(goto)(239, 237, 239) */
		reached[2][237] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 86: // STATE 237 - refit.pml:129 - [.(goto)] (0:239:0 - 2)
		IfNotBlocked
		reached[2][237] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 87: // STATE 235 - refit.pml:127 - [(1)] (239:0:0 - 1)
		IfNotBlocked
		reached[2][235] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(239, 237, 239) */
		reached[2][237] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 88: // STATE 239 - refit.pml:131 - [(((r_attempt[i]!=attempt)||!(r_writing[i])))] (0:0:0 - 1)
		IfNotBlocked
		reached[2][239] = 1;
		if (!(((((int)now.r_attempt[ Index(((int)((P2 *)_this)->i), 2) ])!=((int)((P2 *)_this)->attempt))|| !(((int)now.r_writing[ Index(((int)((P2 *)_this)->i), 2) ])))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 89: // STATE 240 - refit.pml:133 - [i = (i+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[2][240] = 1;
		(trpt+1)->bup.oval = ((int)((P2 *)_this)->i);
		((P2 *)_this)->i = (((int)((P2 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("Coordinator:i", ((int)((P2 *)_this)->i));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 90: // STATE 248 - refit.pml:319 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[2][248] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC Receiver */
	case 91: // STATE 1 - refit.pml:81 - [((((r_open[me]&&!(r_obsolete[me]))&&!(r_writing[me]))&&(r_completed[me]!=r_attempt[me])))] (10:0:3 - 1)
		IfNotBlocked
		reached[1][1] = 1;
		if (!((((((int)now.r_open[ Index(((int)((P1 *)_this)->me), 2) ])&& !(((int)now.r_obsolete[ Index(((int)((P1 *)_this)->me), 2) ])))&& !(((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ])))&&(((int)now.r_completed[ Index(((int)((P1 *)_this)->me), 2) ])!=((int)now.r_attempt[ Index(((int)((P1 *)_this)->me), 2) ])))))
			continue;
		/* merge: r_writing[me] = 1(10, 2, 10) */
		reached[1][2] = 1;
		(trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_writing[Receiver:me]", ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		/* merge: attempt = r_attempt[me](10, 3, 10) */
		reached[1][3] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P1 *)_this)->attempt);
		((P1 *)_this)->attempt = ((int)now.r_attempt[ Index(((int)((P1 *)_this)->me), 2) ]);
#ifdef VAR_RANGES
		logval("Receiver:attempt", ((int)((P1 *)_this)->attempt));
#endif
		;
		/* merge: mixed = r_mixed[me](10, 4, 10) */
		reached[1][4] = 1;
		(trpt+1)->bup.ovals[2] = ((int)((P1 *)_this)->mixed);
		((P1 *)_this)->mixed = ((int)now.r_mixed[ Index(((int)((P1 *)_this)->me), 2) ]);
#ifdef VAR_RANGES
		logval("Receiver:mixed", ((int)((P1 *)_this)->mixed));
#endif
		;
		/* merge: assert(r_gate_closed[me])(10, 5, 10) */
		reached[1][5] = 1;
		spin_assert(((int)now.r_gate_closed[ Index(((int)((P1 *)_this)->me), 2) ]), "r_gate_closed[me]", II, tt, t);
		_m = 3; goto P999; /* 4 */
	case 92: // STATE 6 - refit.pml:87 - [((mixed&&(r_bits[me]!=0)))] (26:0:2 - 1)
		IfNotBlocked
		reached[1][6] = 1;
		if (!((((int)((P1 *)_this)->mixed)&&(((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ])!=0))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: mixed */  (trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((P1 *)_this)->mixed;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P1 *)_this)->mixed = 0;
		/* merge: r_bits[me] = 3(26, 7, 26) */
		reached[1][7] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = 3;
#ifdef VAR_RANGES
		logval("r_bits[Receiver:me]", ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		/* merge: .(goto)(26, 11, 26) */
		reached[1][11] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 93: // STATE 11 - refit.pml:90 - [.(goto)] (0:26:0 - 2)
		IfNotBlocked
		reached[1][11] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 94: // STATE 9 - refit.pml:88 - [r_bits[me] = 1] (0:26:1 - 1)
		IfNotBlocked
		reached[1][9] = 1;
		(trpt+1)->bup.oval = ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = 1;
#ifdef VAR_RANGES
		logval("r_bits[Receiver:me]", ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		/* merge: .(goto)(26, 11, 26) */
		reached[1][11] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 95: // STATE 13 - refit.pml:93 - [((r_bits[me]!=3))] (24:0:2 - 1)
		IfNotBlocked
		reached[1][13] = 1;
		if (!((((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ])!=3)))
			continue;
		/* merge: r_bits[me] = 2(24, 14, 24) */
		reached[1][14] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_bits[ Index(((P1 *)_this)->me, 2) ] = 2;
#ifdef VAR_RANGES
		logval("r_bits[Receiver:me]", ((int)now.r_bits[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		/* merge: .(goto)(24, 18, 24) */
		reached[1][18] = 1;
		;
		/* merge: r_writing[me] = 0(24, 19, 24) */
		reached[1][19] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_writing[Receiver:me]", ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		_m = 3; goto P999; /* 3 */
	case 96: // STATE 16 - refit.pml:94 - [(1)] (24:0:1 - 1)
		IfNotBlocked
		reached[1][16] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(24, 18, 24) */
		reached[1][18] = 1;
		;
		/* merge: r_writing[me] = 0(24, 19, 24) */
		reached[1][19] = 1;
		(trpt+1)->bup.oval = ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_writing[Receiver:me]", ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		_m = 3; goto P999; /* 2 */
	case 97: // STATE 19 - refit.pml:96 - [r_writing[me] = 0] (0:24:1 - 3)
		IfNotBlocked
		reached[1][19] = 1;
		(trpt+1)->bup.oval = ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_writing[ Index(((P1 *)_this)->me, 2) ] = 0;
#ifdef VAR_RANGES
		logval("r_writing[Receiver:me]", ((int)now.r_writing[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 98: // STATE 20 - refit.pml:98 - [(((r_attempt[me]==attempt)&&!(r_obsolete[me])))] (27:0:1 - 1)
		IfNotBlocked
		reached[1][20] = 1;
		if (!(((((int)now.r_attempt[ Index(((int)((P1 *)_this)->me), 2) ])==((int)((P1 *)_this)->attempt))&& !(((int)now.r_obsolete[ Index(((int)((P1 *)_this)->me), 2) ])))))
			continue;
		/* merge: r_completed[me] = attempt(27, 21, 27) */
		reached[1][21] = 1;
		(trpt+1)->bup.oval = ((int)now.r_completed[ Index(((int)((P1 *)_this)->me), 2) ]);
		now.r_completed[ Index(((P1 *)_this)->me, 2) ] = ((int)((P1 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("r_completed[Receiver:me]", ((int)now.r_completed[ Index(((int)((P1 *)_this)->me), 2) ]));
#endif
		;
		/* merge: .(goto)(27, 25, 27) */
		reached[1][25] = 1;
		;
		/* merge: .(goto)(0, 28, 27) */
		reached[1][28] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 99: // STATE 25 - refit.pml:101 - [.(goto)] (0:27:0 - 2)
		IfNotBlocked
		reached[1][25] = 1;
		;
		/* merge: .(goto)(0, 28, 27) */
		reached[1][28] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 100: // STATE 23 - refit.pml:99 - [(1)] (27:0:0 - 1)
		IfNotBlocked
		reached[1][23] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(27, 25, 27) */
		reached[1][25] = 1;
		;
		/* merge: .(goto)(0, 28, 27) */
		reached[1][28] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 101: // STATE 30 - refit.pml:103 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[1][30] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC LateCommit */
	case 102: // STATE 1 - refit.pml:68 - [((revision==seen))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][1] = 1;
		if (!((((int)now.revision)==((int)((P0 *)_this)->seen))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: seen */  (trpt+1)->bup.oval = ((P0 *)_this)->seen;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->seen = 0;
		_m = 3; goto P999; /* 0 */
	case 103: // STATE 2 - refit.pml:55 - [assert((version==0))] (0:15:3 - 1)
		IfNotBlocked
		reached[0][2] = 1;
		spin_assert((((int)now.version)==0), "(version==0)", II, tt, t);
		/* merge: assert(!(answered[attempt]))(15, 3, 15) */
		reached[0][3] = 1;
		spin_assert( !(((int)now.answered[ Index(((int)((P0 *)_this)->attempt), 4) ])), " !(answered[attempt])", II, tt, t);
		/* merge: assert(((r_completed[0]==attempt)&&(r_bits[0]==2)))(15, 4, 15) */
		reached[0][4] = 1;
		spin_assert(((((int)now.r_completed[0])==((int)((P0 *)_this)->attempt))&&(((int)now.r_bits[0])==2)), "((r_completed[0]==attempt)&&(r_bits[0]==2))", II, tt, t);
		/* merge: assert(((r_completed[1]==attempt)&&(r_bits[1]==2)))(15, 5, 15) */
		reached[0][5] = 1;
		spin_assert(((((int)now.r_completed[1])==((int)((P0 *)_this)->attempt))&&(((int)now.r_bits[1])==2)), "((r_completed[1]==attempt)&&(r_bits[1]==2))", II, tt, t);
		/* merge: version = 1(15, 6, 15) */
		reached[0][6] = 1;
		(trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((int)now.version);
		now.version = 1;
#ifdef VAR_RANGES
		logval("version", ((int)now.version));
#endif
		;
		/* merge: committed = attempt(15, 7, 15) */
		reached[0][7] = 1;
		(trpt+1)->bup.ovals[1] = ((int)now.committed);
		now.committed = ((int)((P0 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("committed", ((int)now.committed));
#endif
		;
		/* merge: revision = (revision+1)(15, 8, 15) */
		reached[0][8] = 1;
		(trpt+1)->bup.ovals[2] = ((int)now.revision);
		now.revision = (((int)now.revision)+1);
#ifdef VAR_RANGES
		logval("revision", ((int)now.revision));
#endif
		;
		/* merge: .(goto)(15, 13, 15) */
		reached[0][13] = 1;
		;
		_m = 3; goto P999; /* 7 */
	case 104: // STATE 13 - refit.pml:71 - [.(goto)] (0:15:0 - 2)
		IfNotBlocked
		reached[0][13] = 1;
		;
		_m = 3; goto P999; /* 0 */
	case 105: // STATE 11 - refit.pml:69 - [(1)] (15:0:0 - 1)
		IfNotBlocked
		reached[0][11] = 1;
		if (!(1))
			continue;
		/* merge: .(goto)(15, 13, 15) */
		reached[0][13] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 106: // STATE 15 - refit.pml:72 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[0][15] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */
	case  _T5:	/* np_ */
		if (!((!(trpt->o_pm&4) && !(trpt->tau&128))))
			continue;
		/* else fall through */
	case  _T2:	/* true */
		_m = 3; goto P999;
#undef rand
	}

