#ifdef PEG
struct T_SRC {
	char *fl; int ln;
} T_SRC[NTRANS];

void
tr_2_src(int m, char *file, int ln)
{	T_SRC[m].fl = file;
	T_SRC[m].ln = ln;
}

void
putpeg(int n, int m)
{	printf("%5d	trans %4d ", m, n);
	printf("%s:%d\n",
		T_SRC[n].fl, T_SRC[n].ln);
}
#endif

void
settable(void)
{	Trans *T;
	Trans *settr(int, int, int, int, int, char *, int, int, int);

	trans = (Trans ***) emalloc(6*sizeof(Trans **));

	/* proctype 4: Watch */

	trans[4] = (Trans **) emalloc(8*sizeof(Trans *));

	trans[4][5]	= settr(303,0,4,1,0,".(goto)", 0, 2, 0);
	T = trans[4][4] = settr(302,0,0,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(302,0,3,0,0,"DO", 0, 2, 0);
	T = trans[ 4][3] = settr(301,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(301,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[4][1]	= settr(299,0,4,3,3,"(((!(r_gate_closed[0])&&!((((r_bits[0]==0)&&(version==0))||((r_bits[0]==2)&&(version==1)))))||(!(r_gate_closed[1])&&!((((r_bits[1]==0)&&(version==0))||((r_bits[1]==2)&&(version==1)))))))", 1, 2, 0); /* m: 2 -> 4,0 */
	reached4[2] = 1;
	trans[4][2]	= settr(0,0,0,0,0,"assert(0)",0,0,0);
	trans[4][6]	= settr(304,0,7,1,0,"break", 0, 2, 0);
	trans[4][7]	= settr(305,0,0,4,4,"-end-", 0, 3500, 0);

	/* proctype 3: :init: */

	trans[3] = (Trans **) emalloc(7*sizeof(Trans *));

	T = trans[ 3][4] = settr(296,2,0,0,0,"ATOMIC", 0, 2, 0);
	T->nxt	= settr(296,2,1,0,0,"ATOMIC", 0, 2, 0);
	trans[3][1]	= settr(293,2,2,5,5,"(run Receiver(0))", 0, 2, 0);
	trans[3][2]	= settr(294,2,3,6,6,"(run Receiver(1))", 0, 2, 0);
	trans[3][3]	= settr(295,0,5,7,7,"(run Coordinator(0))", 0, 2, 0);
	trans[3][5]	= settr(297,0,6,8,8,"(run Coordinator(1))", 0, 2, 0);
	trans[3][6]	= settr(298,0,0,9,9,"-end-", 0, 3500, 0);

	/* proctype 2: Coordinator */

	trans[2] = (Trans **) emalloc(249*sizeof(Trans *));

	T = trans[ 2][5] = settr(49,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(49,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[2][1]	= settr(45,4,50,10,10,"epoch = (epoch+1)", 1, 2, 0); /* m: 2 -> 0,50 */
	reached2[2] = 1;
	trans[2][2]	= settr(0,0,0,0,0,"my_epoch = epoch",0,0,0);
	trans[2][3]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][4]	= settr(0,0,0,0,0,"old = bound",0,0,0);
	T = trans[2][50] = settr(94,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(94,0,6,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(94,0,48,0,0,"IF", 0, 2, 0);
	trans[2][6]	= settr(50,0,15,11,0,"((old!=0))", 0, 2, 0);
	T = trans[ 2][15] = settr(59,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(59,0,14,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 2][14] = settr(58,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(58,2,12,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][12] = settr(56,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(56,2,7,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(56,2,10,0,0,"IF", 1, 2, 0);
	trans[2][7]	= settr(51,4,32,12,12,"((((bound==old)&&!(obsolete))&&(version==0)))", 1, 2, 0); /* m: 8 -> 32,0 */
	reached2[8] = 1;
	trans[2][8]	= settr(0,0,0,0,0,"obsolete = 1",0,0,0);
	trans[2][9]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][13]	= settr(57,0,32,13,13,".(goto)", 1, 2, 0);
	trans[2][10]	= settr(54,2,11,2,0,"else", 1, 2, 0);
	trans[2][11]	= settr(55,4,32,14,14,"(1)", 1, 2, 0); /* m: 13 -> 32,0 */
	reached2[13] = 1;
	T = trans[ 2][32] = settr(76,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(76,0,16,0,0,"sub-sequence", 0, 2, 0);
	trans[2][16]	= settr(60,0,29,15,15,"i = 0", 0, 2, 0);
	trans[2][30]	= settr(74,0,29,1,0,".(goto)", 0, 2, 0);
	T = trans[2][29] = settr(73,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(73,0,17,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(73,0,27,0,0,"DO", 0, 2, 0);
	trans[2][17]	= settr(61,0,24,16,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][24] = settr(68,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(68,2,22,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][22] = settr(66,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(66,2,18,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(66,2,20,0,0,"IF", 1, 2, 0);
	trans[2][18]	= settr(62,4,25,17,17,"((r_attempt[i]==old))", 1, 2, 0); /* m: 19 -> 25,0 */
	reached2[19] = 1;
	trans[2][19]	= settr(0,0,0,0,0,"r_obsolete[i] = 1",0,0,0);
	trans[2][23]	= settr(67,0,25,18,18,".(goto)", 1, 2, 0);
	trans[2][20]	= settr(64,2,21,2,0,"else", 1, 2, 0);
	trans[2][21]	= settr(65,4,25,19,19,"(1)", 1, 2, 0); /* m: 23 -> 25,0 */
	reached2[23] = 1;
	trans[2][25]	= settr(69,0,26,20,0,"(((r_attempt[i]!=old)||!(r_writing[i])))", 1, 2, 0);
	trans[2][26]	= settr(70,0,29,21,21,"i = (i+1)", 0, 2, 0);
	trans[2][27]	= settr(71,0,39,2,0,"else", 0, 2, 0);
	trans[2][28]	= settr(72,0,39,1,0,"goto :b1", 0, 2, 0);
	trans[2][31]	= settr(75,0,39,1,0,"break", 0, 2, 0);
	T = trans[2][39] = settr(83,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(83,0,33,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(83,0,36,0,0,"IF", 0, 2, 0);
	trans[2][33]	= settr(77,0,34,22,0,"((version==1))", 1, 2, 0);
	trans[2][34]	= settr(78,0,196,23,23,"attempt = committed", 1, 2, 0);
	trans[2][35]	= settr(79,0,196,1,0,"goto publish", 0, 2, 0);
	trans[2][40]	= settr(84,0,46,1,0,".(goto)", 0, 2, 0);
	trans[2][36]	= settr(80,0,38,24,0,"((version==0))", 1, 2, 0);
	T = trans[ 2][38] = settr(82,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(82,2,37,0,0,"ATOMIC", 1, 2, 0);
	trans[2][37]	= settr(81,0,46,25,25,"answered[old] = (version==0)", 1, 2, 0);
	T = trans[2][46] = settr(90,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(90,0,41,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(90,0,44,0,0,"IF", 0, 2, 0);
	trans[2][41]	= settr(85,0,42,26,0,"((version==1))", 1, 2, 0);
	trans[2][42]	= settr(86,0,196,27,27,"attempt = committed", 1, 2, 0);
	trans[2][43]	= settr(87,0,196,1,0,"goto publish", 0, 2, 0);
	trans[2][47]	= settr(91,0,56,1,0,".(goto)", 0, 2, 0);
	trans[2][44]	= settr(88,0,45,2,0,"else", 0, 2, 0);
	trans[2][45]	= settr(89,0,56,1,0,"(1)", 0, 2, 0);
	trans[2][51]	= settr(95,0,56,1,0,".(goto)", 0, 2, 0);
	trans[2][48]	= settr(92,0,49,2,0,"else", 0, 2, 0);
	trans[2][49]	= settr(93,0,56,1,0,"(1)", 0, 2, 0);
	T = trans[2][56] = settr(100,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(100,0,52,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(100,0,54,0,0,"IF", 0, 2, 0);
	trans[2][52]	= settr(96,0,247,28,0,"((attempts==3))", 1, 2, 0);
	trans[2][53]	= settr(97,0,247,1,0,"goto done", 0, 2, 0);
	trans[2][57]	= settr(101,0,65,1,0,".(goto)", 0, 2, 0);
	trans[2][54]	= settr(98,0,55,2,0,"else", 0, 2, 0);
	trans[2][55]	= settr(99,0,65,1,0,"(1)", 0, 2, 0);
	T = trans[ 2][65] = settr(109,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(109,2,63,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][63] = settr(107,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(107,2,58,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(107,2,61,0,0,"IF", 1, 2, 0);
	trans[2][58]	= settr(102,4,78,29,29,"((attempts<3))", 1, 2, 0); /* m: 59 -> 78,0 */
	reached2[59] = 1;
	trans[2][59]	= settr(0,0,0,0,0,"attempts = (attempts+1)",0,0,0);
	trans[2][60]	= settr(0,0,0,0,0,"attempt = attempts",0,0,0);
	trans[2][64]	= settr(108,0,78,1,0,".(goto)", 1, 2, 0);
	trans[2][61]	= settr(105,2,62,2,0,"else", 1, 2, 0);
	trans[2][62]	= settr(106,0,247,1,0,"goto done", 1, 2, 0);
	T = trans[ 2][78] = settr(122,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(122,2,76,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][76] = settr(120,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(120,2,66,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(120,2,68,0,0,"IF", 1, 2, 0);
	trans[2][66]	= settr(110,4,247,30,30,"((!((epoch==my_epoch))||(version==1)))", 1, 2, 0); /* m: 67 -> 247,0 */
	reached2[67] = 1;
	trans[2][67]	= settr(111,0,247,1,0,"goto done", 1, 2, 0);
	trans[2][77]	= settr(121,0,101,31,31,".(goto)", 1, 2, 0); /* m: 79 -> 0,101 */
	reached2[79] = 1;
	trans[2][68]	= settr(112,2,69,2,0,"else", 1, 2, 0);
	trans[2][69]	= settr(113,0,101,32,32,"mixed = (!(admitted)||0)", 1, 2, 0); /* m: 70 -> 0,101 */
	reached2[70] = 1;
	trans[2][70]	= settr(0,0,0,0,0,"bound = attempt",0,0,0);
	trans[2][71]	= settr(0,0,0,0,0,"bound_epoch = my_epoch",0,0,0);
	trans[2][72]	= settr(0,0,0,0,0,"obsolete = 0",0,0,0);
	trans[2][73]	= settr(0,0,0,0,0,"admitted = 1",0,0,0);
	trans[2][74]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][75]	= settr(0,0,0,0,0,"seen = revision",0,0,0);
	trans[2][79]	= settr(0,0,0,0,0,"ok = 1",0,0,0);
	T = trans[ 2][101] = settr(145,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(145,0,80,0,0,"sub-sequence", 0, 2, 0);
	trans[2][80]	= settr(124,0,98,33,33,"i = 0", 0, 2, 0);
	trans[2][99]	= settr(143,0,98,1,0,".(goto)", 0, 2, 0);
	T = trans[2][98] = settr(142,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(142,0,81,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(142,0,96,0,0,"DO", 0, 2, 0);
	trans[2][81]	= settr(125,0,94,34,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][94] = settr(138,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(138,2,92,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][92] = settr(136,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(136,2,82,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(136,2,84,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(136,2,86,0,0,"IF", 1, 2, 0);
	trans[2][82]	= settr(126,0,98,35,35,"((seen<=r_revision[i]))", 1, 2, 0); /* m: 83 -> 98,0 */
	reached2[83] = 1;
	trans[2][83]	= settr(0,0,0,0,0,"ok = 0",0,0,0);
	trans[2][93]	= settr(137,0,98,36,36,".(goto)", 1, 2, 0); /* m: 95 -> 0,98 */
	reached2[95] = 1;
	trans[2][84]	= settr(128,0,98,37,37,"(r_writing[i])", 1, 2, 0); /* m: 85 -> 98,0 */
	reached2[85] = 1;
	trans[2][85]	= settr(0,0,0,0,0,"ok = 0",0,0,0);
	trans[2][86]	= settr(130,0,98,38,38,"(((seen>r_revision[i])&&!(r_writing[i])))", 1, 2, 0); /* m: 87 -> 98,0 */
	reached2[87] = 1;
	trans[2][87]	= settr(0,0,0,0,0,"r_attempt[i] = attempt",0,0,0);
	trans[2][88]	= settr(0,0,0,0,0,"r_revision[i] = seen",0,0,0);
	trans[2][89]	= settr(0,0,0,0,0,"r_mixed[i] = mixed",0,0,0);
	trans[2][90]	= settr(0,0,0,0,0,"r_open[i] = 0",0,0,0);
	trans[2][91]	= settr(0,0,0,0,0,"r_obsolete[i] = 0",0,0,0);
	trans[2][95]	= settr(0,0,0,0,0,"i = (i+1)",0,0,0);
	trans[2][96]	= settr(140,0,122,2,0,"else", 0, 2, 0);
	trans[2][97]	= settr(141,0,122,1,0,"goto :b2", 0, 2, 0);
	trans[2][100]	= settr(144,0,122,1,0,"break", 0, 2, 0);
	T = trans[2][122] = settr(166,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(166,0,102,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(166,0,120,0,0,"IF", 0, 2, 0);
	trans[2][102]	= settr(146,0,119,39,39,"(ok)", 0, 2, 0);
	T = trans[ 2][119] = settr(163,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(163,0,103,0,0,"sub-sequence", 0, 2, 0);
	trans[2][103]	= settr(147,0,116,40,40,"i = 0", 0, 2, 0);
	trans[2][117]	= settr(161,0,116,1,0,".(goto)", 0, 2, 0);
	T = trans[2][116] = settr(160,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(160,0,104,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(160,0,114,0,0,"DO", 0, 2, 0);
	trans[2][104]	= settr(148,0,112,41,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][112] = settr(156,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(156,2,110,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][110] = settr(154,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(154,2,105,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(154,2,108,0,0,"IF", 1, 2, 0);
	trans[2][105]	= settr(149,0,116,42,42,"(((r_attempt[i]==attempt)&&!(r_obsolete[i])))", 1, 2, 0); /* m: 106 -> 116,0 */
	reached2[106] = 1;
	trans[2][106]	= settr(0,0,0,0,0,"r_gate_closed[i] = 1",0,0,0);
	trans[2][107]	= settr(0,0,0,0,0,"r_open[i] = 1",0,0,0);
	trans[2][111]	= settr(155,0,116,43,43,".(goto)", 1, 2, 0); /* m: 113 -> 0,116 */
	reached2[113] = 1;
	trans[2][108]	= settr(152,2,109,2,0,"else", 1, 2, 0);
	trans[2][109]	= settr(153,0,116,44,44,"(1)", 1, 2, 0); /* m: 111 -> 116,0 */
	reached2[111] = 1;
	trans[2][113]	= settr(0,0,0,0,0,"i = (i+1)",0,0,0);
	trans[2][114]	= settr(158,0,128,2,0,"else", 0, 2, 0);
	trans[2][115]	= settr(159,0,128,1,0,"goto :b3", 0, 2, 0);
	trans[2][118]	= settr(162,0,128,1,0,"break", 0, 2, 0);
	trans[2][123]	= settr(167,0,128,1,0,".(goto)", 0, 2, 0);
	trans[2][120]	= settr(164,0,206,2,0,"else", 0, 2, 0);
	trans[2][121]	= settr(165,0,206,1,0,"goto recover", 0, 2, 0);
	T = trans[2][128] = settr(172,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(172,0,124,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(172,0,126,0,0,"IF", 0, 2, 0);
	trans[2][124]	= settr(168,0,125,45,0,"(((r_completed[0]==attempt)&&(r_completed[1]==attempt)))", 1, 2, 0);
	trans[2][125]	= settr(169,0,156,1,0,"(1)", 0, 2, 0);
	trans[2][129]	= settr(173,0,156,1,0,".(goto)", 0, 2, 0);
	trans[2][126]	= settr(170,0,206,1,0,"(1)", 0, 2, 0);
	trans[2][127]	= settr(171,0,206,1,0,"goto recover", 0, 2, 0);
	T = trans[ 2][156] = settr(200,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(200,2,130,0,0,"ATOMIC", 1, 2, 0);
	trans[2][130]	= settr(174,2,154,46,46,"seen = revision", 1, 2, 0); /* m: 131 -> 0,154 */
	reached2[131] = 1;
	trans[2][131]	= settr(0,0,0,0,0,"unknown = 0",0,0,0);
	T = trans[2][154] = settr(198,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(198,2,132,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(198,2,134,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(198,2,136,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(198,2,138,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(198,2,140,0,0,"IF", 1, 2, 0);
	trans[2][132]	= settr(176,2,133,47,0,"(((version==1)&&(committed==attempt)))", 1, 2, 0);
	trans[2][133]	= settr(177,4,179,48,48,"(1)", 1, 2, 0); /* m: 155 -> 179,0 */
	reached2[155] = 1;
	trans[2][155]	= settr(199,0,179,49,49,".(goto)", 1, 2, 0);
	trans[2][134]	= settr(178,4,247,50,50,"(((version==1)&&(committed!=attempt)))", 1, 2, 0); /* m: 135 -> 247,0 */
	reached2[135] = 1;
	trans[2][135]	= settr(179,0,247,1,0,"goto done", 1, 2, 0);
	trans[2][136]	= settr(180,4,247,51,51,"(((version==0)&&!((epoch==my_epoch))))", 1, 2, 0); /* m: 137 -> 247,0 */
	reached2[137] = 1;
	trans[2][137]	= settr(181,0,247,1,0,"goto done", 1, 2, 0);
	trans[2][138]	= settr(182,4,206,52,52,"((((version==0)&&(epoch==my_epoch))&&((bound!=attempt)||obsolete)))", 1, 2, 0); /* m: 139 -> 206,0 */
	reached2[139] = 1;
	trans[2][139]	= settr(183,0,206,1,0,"goto recover", 1, 2, 0);
	trans[2][140]	= settr(184,2,152,53,0,"(((((version==0)&&(epoch==my_epoch))&&(bound==attempt))&&!(obsolete)))", 1, 2, 0);
	T = trans[2][152] = settr(196,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(196,2,148,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(196,2,149,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(196,2,151,0,0,"IF", 1, 2, 0);
	T = trans[ 2][148] = settr(192,0,0,0,0,"sub-sequence", 1, 2, 0);
	T->nxt	= settr(192,0,141,0,0,"sub-sequence", 1, 2, 0);
	trans[2][141]	= settr(185,4,179,54,54,"assert((version==0))", 1, 2, 0); /* m: 142 -> 0,179 */
	reached2[142] = 1;
	trans[2][142]	= settr(0,0,0,0,0,"assert(!(answered[attempt]))",0,0,0);
	trans[2][143]	= settr(0,0,0,0,0,"assert(((r_completed[0]==attempt)&&(r_bits[0]==2)))",0,0,0);
	trans[2][144]	= settr(0,0,0,0,0,"assert(((r_completed[1]==attempt)&&(r_bits[1]==2)))",0,0,0);
	trans[2][145]	= settr(0,0,0,0,0,"version = 1",0,0,0);
	trans[2][146]	= settr(0,0,0,0,0,"committed = attempt",0,0,0);
	trans[2][147]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][153]	= settr(197,4,179,55,55,".(goto)", 1, 2, 0); /* m: 155 -> 0,179 */
	reached2[155] = 1;
	trans[2][149]	= settr(193,2,150,56,56,"unknown = 1", 1, 2, 0);
	trans[2][150]	= settr(194,2,153,57,57,"(run LateCommit(seen,attempt))", 1, 2, 0);
	trans[2][151]	= settr(195,4,179,58,58,"unknown = 1", 1, 2, 0); /* m: 153 -> 0,179 */
	reached2[153] = 1;
	T = trans[2][179] = settr(223,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(223,0,157,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(223,0,177,0,0,"IF", 0, 2, 0);
	trans[2][157]	= settr(201,0,166,59,59,"(unknown)", 0, 2, 0);
	T = trans[ 2][166] = settr(210,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(210,0,165,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 2][165] = settr(209,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(209,2,163,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][163] = settr(207,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(207,2,158,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(207,2,161,0,0,"IF", 1, 2, 0);
	trans[2][158]	= settr(202,4,176,60,60,"((((bound==attempt)&&!(obsolete))&&(version==0)))", 1, 2, 0); /* m: 159 -> 176,0 */
	reached2[159] = 1;
	trans[2][159]	= settr(0,0,0,0,0,"obsolete = 1",0,0,0);
	trans[2][160]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][164]	= settr(208,0,176,61,61,".(goto)", 1, 2, 0);
	trans[2][161]	= settr(205,2,162,2,0,"else", 1, 2, 0);
	trans[2][162]	= settr(206,4,176,62,62,"(1)", 1, 2, 0); /* m: 164 -> 176,0 */
	reached2[164] = 1;
	T = trans[ 2][176] = settr(220,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(220,2,174,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][174] = settr(218,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(218,2,167,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(218,2,169,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(218,2,171,0,0,"IF", 1, 2, 0);
	trans[2][167]	= settr(211,2,168,63,0,"(((version==1)&&(committed==attempt)))", 1, 2, 0);
	trans[2][168]	= settr(212,0,196,64,64,"(1)", 1, 2, 0); /* m: 175 -> 196,0 */
	reached2[175] = 1;
	trans[2][175]	= settr(219,0,196,1,0,".(goto)", 1, 2, 0);
	trans[2][169]	= settr(213,4,246,65,65,"(((version==1)&&(committed!=attempt)))", 1, 2, 0); /* m: 170 -> 246,0 */
	reached2[170] = 1;
	trans[2][170]	= settr(214,0,246,1,0,"goto lost", 1, 2, 0);
	trans[2][171]	= settr(215,4,206,66,66,"((version==0))", 1, 2, 0); /* m: 172 -> 206,0 */
	reached2[172] = 1;
	trans[2][172]	= settr(0,0,0,0,0,"answered[attempt] = 1",0,0,0);
	trans[2][173]	= settr(217,0,206,1,0,"goto recover", 1, 2, 0);
	trans[2][180]	= settr(224,0,196,1,0,".(goto)", 0, 2, 0);
	trans[2][177]	= settr(221,0,178,2,0,"else", 0, 2, 0);
	trans[2][178]	= settr(222,0,196,1,0,"(1)", 0, 2, 0);
	T = trans[ 2][196] = settr(240,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(240,0,181,0,0,"sub-sequence", 0, 2, 0);
	trans[2][181]	= settr(225,0,193,67,67,"i = 0", 0, 2, 0);
	trans[2][194]	= settr(238,0,193,1,0,".(goto)", 0, 2, 0);
	T = trans[2][193] = settr(237,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(237,0,182,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(237,0,191,0,0,"DO", 0, 2, 0);
	trans[2][182]	= settr(226,0,189,68,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][189] = settr(233,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(233,2,187,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][187] = settr(231,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(231,2,183,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(231,2,185,0,0,"IF", 1, 2, 0);
	trans[2][183]	= settr(227,0,193,69,69,"(((((r_attempt[i]==attempt)&&(version==1))&&(r_completed[i]==committed))&&!(r_writing[i])))", 1, 2, 0); /* m: 184 -> 193,0 */
	reached2[184] = 1;
	trans[2][184]	= settr(0,0,0,0,0,"r_gate_closed[i] = 0",0,0,0);
	trans[2][188]	= settr(232,0,193,70,70,".(goto)", 1, 2, 0); /* m: 190 -> 0,193 */
	reached2[190] = 1;
	trans[2][185]	= settr(229,2,186,2,0,"else", 1, 2, 0);
	trans[2][186]	= settr(230,0,193,71,71,"(1)", 1, 2, 0); /* m: 188 -> 193,0 */
	reached2[188] = 1;
	trans[2][190]	= settr(0,0,0,0,0,"i = (i+1)",0,0,0);
	trans[2][191]	= settr(235,0,247,2,0,"else", 0, 2, 0);
	trans[2][192]	= settr(236,0,247,1,0,"goto :b4", 0, 2, 0);
	trans[2][195]	= settr(239,0,247,1,0,"break", 0, 2, 0);
	trans[2][197]	= settr(241,0,247,1,0,"goto done", 0, 2, 0);
	T = trans[ 2][206] = settr(250,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(250,0,205,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 2][205] = settr(249,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(249,2,203,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][203] = settr(247,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(247,2,198,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(247,2,201,0,0,"IF", 1, 2, 0);
	trans[2][198]	= settr(242,4,223,72,72,"((((bound==attempt)&&!(obsolete))&&(version==0)))", 1, 2, 0); /* m: 199 -> 223,0 */
	reached2[199] = 1;
	trans[2][199]	= settr(0,0,0,0,0,"obsolete = 1",0,0,0);
	trans[2][200]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[2][204]	= settr(248,0,223,73,73,".(goto)", 1, 2, 0);
	trans[2][201]	= settr(245,2,202,2,0,"else", 1, 2, 0);
	trans[2][202]	= settr(246,4,223,74,74,"(1)", 1, 2, 0); /* m: 204 -> 223,0 */
	reached2[204] = 1;
	T = trans[ 2][223] = settr(267,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(267,0,207,0,0,"sub-sequence", 0, 2, 0);
	trans[2][207]	= settr(251,0,220,75,75,"i = 0", 0, 2, 0);
	trans[2][221]	= settr(265,0,220,1,0,".(goto)", 0, 2, 0);
	T = trans[2][220] = settr(264,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(264,0,208,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(264,0,218,0,0,"DO", 0, 2, 0);
	trans[2][208]	= settr(252,0,215,76,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][215] = settr(259,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(259,2,213,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][213] = settr(257,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(257,2,209,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(257,2,211,0,0,"IF", 1, 2, 0);
	trans[2][209]	= settr(253,4,216,77,77,"((r_attempt[i]==attempt))", 1, 2, 0); /* m: 210 -> 216,0 */
	reached2[210] = 1;
	trans[2][210]	= settr(0,0,0,0,0,"r_obsolete[i] = 1",0,0,0);
	trans[2][214]	= settr(258,0,216,78,78,".(goto)", 1, 2, 0);
	trans[2][211]	= settr(255,2,212,2,0,"else", 1, 2, 0);
	trans[2][212]	= settr(256,4,216,79,79,"(1)", 1, 2, 0); /* m: 214 -> 216,0 */
	reached2[214] = 1;
	trans[2][216]	= settr(260,0,217,80,0,"(((r_attempt[i]!=attempt)||!(r_writing[i])))", 1, 2, 0);
	trans[2][217]	= settr(261,0,220,81,81,"i = (i+1)", 0, 2, 0);
	trans[2][218]	= settr(262,0,228,2,0,"else", 0, 2, 0);
	trans[2][219]	= settr(263,0,228,1,0,"goto :b5", 0, 2, 0);
	trans[2][222]	= settr(266,0,228,1,0,"break", 0, 2, 0);
	T = trans[2][228] = settr(272,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(272,0,224,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(272,0,226,0,0,"IF", 0, 2, 0);
	trans[2][224]	= settr(268,0,196,82,0,"(((version==1)&&(committed==attempt)))", 1, 2, 0);
	trans[2][225]	= settr(269,0,196,1,0,"goto publish", 0, 2, 0);
	trans[2][229]	= settr(273,0,246,1,0,".(goto)", 0, 2, 0);
	trans[2][226]	= settr(270,0,56,2,0,"else", 0, 2, 0);
	trans[2][227]	= settr(271,0,56,1,0,"goto again", 0, 2, 0);
	T = trans[ 2][246] = settr(290,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(290,0,230,0,0,"sub-sequence", 0, 2, 0);
	trans[2][230]	= settr(274,0,243,83,83,"i = 0", 0, 2, 0);
	trans[2][244]	= settr(288,0,243,1,0,".(goto)", 0, 2, 0);
	T = trans[2][243] = settr(287,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(287,0,231,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(287,0,241,0,0,"DO", 0, 2, 0);
	trans[2][231]	= settr(275,0,238,84,0,"((i<2))", 0, 2, 0);
	T = trans[ 2][238] = settr(282,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(282,2,236,0,0,"ATOMIC", 1, 2, 0);
	T = trans[2][236] = settr(280,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(280,2,232,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(280,2,234,0,0,"IF", 1, 2, 0);
	trans[2][232]	= settr(276,4,239,85,85,"((r_attempt[i]==attempt))", 1, 2, 0); /* m: 233 -> 239,0 */
	reached2[233] = 1;
	trans[2][233]	= settr(0,0,0,0,0,"r_obsolete[i] = 1",0,0,0);
	trans[2][237]	= settr(281,0,239,86,86,".(goto)", 1, 2, 0);
	trans[2][234]	= settr(278,2,235,2,0,"else", 1, 2, 0);
	trans[2][235]	= settr(279,4,239,87,87,"(1)", 1, 2, 0); /* m: 237 -> 239,0 */
	reached2[237] = 1;
	trans[2][239]	= settr(283,0,240,88,0,"(((r_attempt[i]!=attempt)||!(r_writing[i])))", 1, 2, 0);
	trans[2][240]	= settr(284,0,243,89,89,"i = (i+1)", 0, 2, 0);
	trans[2][241]	= settr(285,0,247,2,0,"else", 0, 2, 0);
	trans[2][242]	= settr(286,0,247,1,0,"goto :b6", 0, 2, 0);
	trans[2][245]	= settr(289,0,247,1,0,"break", 0, 2, 0);
	trans[2][247]	= settr(291,0,248,1,0,"(1)", 0, 2, 0);
	trans[2][248]	= settr(292,0,0,90,90,"-end-", 0, 3500, 0);

	/* proctype 1: Receiver */

	trans[1] = (Trans **) emalloc(31*sizeof(Trans *));

	trans[1][28]	= settr(42,0,27,1,0,".(goto)", 0, 2, 0);
	T = trans[1][27] = settr(41,0,0,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(41,0,12,0,0,"DO", 0, 2, 0);
	T = trans[ 1][12] = settr(26,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(26,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[1][1]	= settr(15,2,10,91,91,"((((r_open[me]&&!(r_obsolete[me]))&&!(r_writing[me]))&&(r_completed[me]!=r_attempt[me])))", 1, 2, 0); /* m: 2 -> 10,0 */
	reached1[2] = 1;
	trans[1][2]	= settr(0,0,0,0,0,"r_writing[me] = 1",0,0,0);
	trans[1][3]	= settr(0,0,0,0,0,"attempt = r_attempt[me]",0,0,0);
	trans[1][4]	= settr(0,0,0,0,0,"mixed = r_mixed[me]",0,0,0);
	trans[1][5]	= settr(0,0,0,0,0,"assert(r_gate_closed[me])",0,0,0);
	T = trans[1][10] = settr(24,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(24,2,6,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(24,2,8,0,0,"IF", 1, 2, 0);
	trans[1][6]	= settr(20,4,26,92,92,"((mixed&&(r_bits[me]!=0)))", 1, 2, 0); /* m: 7 -> 26,0 */
	reached1[7] = 1;
	trans[1][7]	= settr(0,0,0,0,0,"r_bits[me] = 3",0,0,0);
	trans[1][11]	= settr(25,0,26,93,93,".(goto)", 1, 2, 0);
	trans[1][8]	= settr(22,2,9,2,0,"else", 1, 2, 0);
	trans[1][9]	= settr(23,4,26,94,94,"r_bits[me] = 1", 1, 2, 0); /* m: 11 -> 0,26 */
	reached1[11] = 1;
	T = trans[ 1][26] = settr(40,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(40,2,17,0,0,"ATOMIC", 1, 2, 0);
	T = trans[1][17] = settr(31,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(31,2,13,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(31,2,15,0,0,"IF", 1, 2, 0);
	trans[1][13]	= settr(27,2,24,95,95,"((r_bits[me]!=3))", 1, 2, 0); /* m: 14 -> 24,0 */
	reached1[14] = 1;
	trans[1][14]	= settr(0,0,0,0,0,"r_bits[me] = 2",0,0,0);
	trans[1][18]	= settr(32,2,19,1,0,".(goto)", 1, 2, 0); /* m: 19 -> 0,24 */
	reached1[19] = 1;
	trans[1][15]	= settr(29,2,16,2,0,"else", 1, 2, 0);
	trans[1][16]	= settr(30,2,24,96,96,"(1)", 1, 2, 0); /* m: 19 -> 24,0 */
	reached1[19] = 1;
	trans[1][19]	= settr(33,2,24,97,97,"r_writing[me] = 0", 1, 2, 0);
	T = trans[1][24] = settr(38,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(38,2,20,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(38,2,22,0,0,"IF", 1, 2, 0);
	trans[1][20]	= settr(34,0,27,98,98,"(((r_attempt[me]==attempt)&&!(r_obsolete[me])))", 1, 2, 0); /* m: 21 -> 27,0 */
	reached1[21] = 1;
	trans[1][21]	= settr(0,0,0,0,0,"r_completed[me] = attempt",0,0,0);
	trans[1][25]	= settr(39,0,27,99,99,".(goto)", 1, 2, 0);
	trans[1][22]	= settr(36,2,23,2,0,"else", 1, 2, 0);
	trans[1][23]	= settr(37,0,27,100,100,"(1)", 1, 2, 0); /* m: 25 -> 27,0 */
	reached1[25] = 1;
	trans[1][29]	= settr(43,0,30,1,0,"break", 0, 2, 0);
	trans[1][30]	= settr(44,0,0,101,101,"-end-", 0, 3500, 0);

	/* proctype 0: LateCommit */

	trans[0] = (Trans **) emalloc(16*sizeof(Trans *));

	T = trans[ 0][14] = settr(13,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(13,2,12,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][12] = settr(11,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(11,2,1,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(11,2,10,0,0,"IF", 1, 2, 0);
	trans[0][1]	= settr(0,2,9,102,102,"((revision==seen))", 1, 2, 0);
	T = trans[ 0][9] = settr(8,0,0,0,0,"sub-sequence", 1, 2, 0);
	T->nxt	= settr(8,0,2,0,0,"sub-sequence", 1, 2, 0);
	trans[0][2]	= settr(1,4,15,103,103,"assert((version==0))", 1, 2, 0); /* m: 3 -> 0,15 */
	reached0[3] = 1;
	trans[0][3]	= settr(0,0,0,0,0,"assert(!(answered[attempt]))",0,0,0);
	trans[0][4]	= settr(0,0,0,0,0,"assert(((r_completed[0]==attempt)&&(r_bits[0]==2)))",0,0,0);
	trans[0][5]	= settr(0,0,0,0,0,"assert(((r_completed[1]==attempt)&&(r_bits[1]==2)))",0,0,0);
	trans[0][6]	= settr(0,0,0,0,0,"version = 1",0,0,0);
	trans[0][7]	= settr(0,0,0,0,0,"committed = attempt",0,0,0);
	trans[0][8]	= settr(0,0,0,0,0,"revision = (revision+1)",0,0,0);
	trans[0][13]	= settr(12,0,15,104,104,".(goto)", 1, 2, 0);
	trans[0][10]	= settr(9,2,11,2,0,"else", 1, 2, 0);
	trans[0][11]	= settr(10,4,15,105,105,"(1)", 1, 2, 0); /* m: 13 -> 15,0 */
	reached0[13] = 1;
	trans[0][15]	= settr(14,0,0,106,106,"-end-", 0, 3500, 0);
	/* np_ demon: */
	trans[_NP_] = (Trans **) emalloc(3*sizeof(Trans *));
	T = trans[_NP_][0] = settr(9997,0,1,_T5,0,"(np_)", 1,2,0);
	    T->nxt	  = settr(9998,0,0,_T2,0,"(1)",   0,2,0);
	T = trans[_NP_][1] = settr(9999,0,1,_T5,0,"(np_)", 1,2,0);
}

Trans *
settr(	int t_id, int a, int b, int c, int d,
	char *t, int g, int tpe0, int tpe1)
{	Trans *tmp = (Trans *) emalloc(sizeof(Trans));

	tmp->atom  = a&(6|32);	/* only (2|8|32) have meaning */
	if (!g) tmp->atom |= 8;	/* no global references */
	tmp->st    = b;
	tmp->tpe[0] = tpe0;
	tmp->tpe[1] = tpe1;
	tmp->tp    = t;
	tmp->t_id  = t_id;
	tmp->forw  = c;
	tmp->back  = d;
	return tmp;
}

Trans *
cpytr(Trans *a)
{	Trans *tmp = (Trans *) emalloc(sizeof(Trans));

	int i;
	tmp->atom  = a->atom;
	tmp->st    = a->st;
#ifdef HAS_UNLESS
	tmp->e_trans = a->e_trans;
	for (i = 0; i < HAS_UNLESS; i++)
		tmp->escp[i] = a->escp[i];
#endif
	tmp->tpe[0] = a->tpe[0];
	tmp->tpe[1] = a->tpe[1];
	for (i = 0; i < 6; i++)
	{	tmp->qu[i] = a->qu[i];
		tmp->ty[i] = a->ty[i];
	}
	tmp->tp    = (char *) emalloc(strlen(a->tp)+1);
	strcpy(tmp->tp, a->tp);
	tmp->t_id  = a->t_id;
	tmp->forw  = a->forw;
	tmp->back  = a->back;
	return tmp;
}

#ifndef NOREDUCE
int
srinc_set(int n)
{	if (n <= 2) return LOCAL;
	if (n <= 2+  DELTA) return Q_FULL_F; /* 's' or nfull  */
	if (n <= 2+2*DELTA) return Q_EMPT_F; /* 'r' or nempty */
	if (n <= 2+3*DELTA) return Q_EMPT_T; /* empty */
	if (n <= 2+4*DELTA) return Q_FULL_T; /* full  */
	if (n ==   5*DELTA) return GLOBAL;
	if (n ==   6*DELTA) return TIMEOUT_F;
	if (n ==   7*DELTA) return ALPHA_F;
	Uerror("cannot happen srinc_class");
	return BAD;
}
int
srunc(int n, int m)
{	switch(m) {
	case Q_FULL_F: return n-2;
	case Q_EMPT_F: return n-2-DELTA;
	case Q_EMPT_T: return n-2-2*DELTA;
	case Q_FULL_T: return n-2-3*DELTA;
	case ALPHA_F:
	case TIMEOUT_F: return 257; /* non-zero, and > MAXQ */
	}
	Uerror("cannot happen srunc");
	return 0;
}
#endif
int cnt;
#ifdef HAS_UNLESS
int
isthere(Trans *a, int b)
{	Trans *t;
	for (t = a; t; t = t->nxt)
		if (t->t_id == b)
			return 1;
	return 0;
}
#endif
#ifndef NOREDUCE
int
mark_safety(Trans *t) /* for conditional safety */
{	int g = 0, i, j, k;

	if (!t) return 0;
	if (t->qu[0])
		return (t->qu[1])?2:1;	/* marked */

	for (i = 0; i < 2; i++)
	{	j = srinc_set(t->tpe[i]);
		if (j >= GLOBAL && j != ALPHA_F)
			return -1;
		if (j != LOCAL)
		{	k = srunc(t->tpe[i], j);
			if (g == 0
			||  t->qu[0] != k
			||  t->ty[0] != j)
			{	t->qu[g] = k;
				t->ty[g] = j;
				g++;
	}	}	}
	return g;
}
#endif
void
retrans(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
	/* process n, with m states, is=initial state */
{	Trans *T0, *T1, *T2, *T3;
	Trans *T4, *T5; /* t_reverse or has_unless */
	int i;
#if defined(HAS_UNLESS) || !defined(NOREDUCE)
	int k;
#endif
#ifndef NOREDUCE
	int g, h, j, aa;
#endif
#ifdef HAS_UNLESS
	int p;
#endif
	if (state_tables >= 4)
	{	printf("STEP 1 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
	do {
		for (i = 1, cnt = 0; i < m; i++)
		{	T2 = trans[n][i];
			T1 = T2?T2->nxt:(Trans *)0;
/* prescan: */		for (T0 = T1; T0; T0 = T0->nxt)
/* choice in choice */	{	if (T0->st && trans[n][T0->st]
				&&  trans[n][T0->st]->nxt)
					break;
			}
#if 0
		if (T0)
		printf("\tstate %d / %d: choice in choice\n",
		i, T0->st);
#endif
			if (T0)
			for (T0 = T1; T0; T0 = T0->nxt)
			{	T3 = trans[n][T0->st];
				if (!T3->nxt)
				{	T2->nxt = cpytr(T0);
					T2 = T2->nxt;
					imed(T2, T0->st, n, i);
					continue;
				}
				do {	T3 = T3->nxt;
					T2->nxt = cpytr(T3);
					T2 = T2->nxt;
					imed(T2, T0->st, n, i);
				} while (T3->nxt);
				cnt++;
			}
		}
	} while (cnt);
	if (state_tables >= 3)
	{	printf("STEP 2 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
	for (i = 1; i < m; i++)
	{	if (trans[n][i] && trans[n][i]->nxt) /* optimize */
		{	T1 = trans[n][i]->nxt;
#if 0
			printf("\t\tpull %d (%d) to %d\n",
			T1->st, T1->forw, i);
#endif
			srcln[i] = srcln[T1->st];	/* Oyvind Teig, 5.2.0 */

			if (!trans[n][T1->st]) continue;
			T0 = cpytr(trans[n][T1->st]);
			trans[n][i] = T0;
			reach[T1->st] = 1;
			imed(T0, T1->st, n, i);
			for (T1 = T1->nxt; T1; T1 = T1->nxt)
			{
#if 0
			printf("\t\tpull %d (%d) to %d\n",
				T1->st, T1->forw, i);
#endif
		/*		srcln[i] = srcln[T1->st];  gh: not useful */
				if (!trans[n][T1->st]) continue;
				T0->nxt = cpytr(trans[n][T1->st]);
				T0 = T0->nxt;
				reach[T1->st] = 1;
				imed(T0, T1->st, n, i);
	}	}	}
	if (state_tables >= 2)
	{	printf("STEP 3 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
#ifdef HAS_UNLESS
	for (i = 1; i < m; i++)
	{	if (!trans[n][i]) continue;
		/* check for each state i if an
		 * escape to some state p is defined
		 * if so, copy and mark p's transitions
		 * and prepend them to the transition-
		 * list of state i
		 */
	 if (!like_java) /* the default */
	 {	for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		for (k = HAS_UNLESS-1; k >= 0; k--)
		{	if (p = T0->escp[k])
			for (T1 = trans[n][p]; T1; T1 = T1->nxt)
			{	if (isthere(trans[n][i], T1->t_id))
					continue;
				T2 = cpytr(T1);
				T2->e_trans = p;
				T2->nxt = trans[n][i];
				trans[n][i] = T2;
		}	}
	 } else /* outermost unless checked first */
	 {	T4 = T3 = (Trans *) 0;
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		for (k = HAS_UNLESS-1; k >= 0; k--)
		{	if (p = T0->escp[k])
			for (T1 = trans[n][p]; T1; T1 = T1->nxt)
			{	if (isthere(trans[n][i], T1->t_id))
					continue;
				T2 = cpytr(T1);
				T2->nxt = (Trans *) 0;
				T2->e_trans = p;
				if (T3)	T3->nxt = T2;
				else	T4 = T2;
				T3 = T2;
		}	}
		if (T4)
		{	T3->nxt = trans[n][i];
			trans[n][i] = T4;
		}
	 }
	}
#endif
#ifndef NOREDUCE
	for (i = 1; i < m; i++)
	{	if (a_cycles)
		{ /* moves through these states are visible */
	#if PROG_LAB>0 && defined(HAS_NP)
			if (progstate[n][i])
				goto degrade;
			for (T1 = trans[n][i]; T1; T1 = T1->nxt)
				if (progstate[n][T1->st])
					goto degrade;
	#endif
			if (accpstate[n][i] || visstate[n][i])
				goto degrade;
			for (T1 = trans[n][i]; T1; T1 = T1->nxt)
				if (accpstate[n][T1->st])
					goto degrade;
		}
		T1 = trans[n][i];
		if (!T1) continue;
		g = mark_safety(T1);	/* V3.3.1 */
		if (g < 0) goto degrade; /* global */
		/* check if mixing of guards preserves reduction */
		if (T1->nxt)
		{	k = 0;
			for (T0 = T1; T0; T0 = T0->nxt)
			{	if (!(T0->atom&8))
					goto degrade;
				for (aa = 0; aa < 2; aa++)
				{	j = srinc_set(T0->tpe[aa]);
					if (j >= GLOBAL && j != ALPHA_F)
						goto degrade;
					if (T0->tpe[aa]
					&&  T0->tpe[aa]
					!=  T1->tpe[0])
						k = 1;
			}	}
			/* g = 0;	V3.3.1 */
			if (k)	/* non-uniform selection */
			for (T0 = T1; T0; T0 = T0->nxt)
			for (aa = 0; aa < 2; aa++)
			{	j = srinc_set(T0->tpe[aa]);
				if (j != LOCAL)
				{	k = srunc(T0->tpe[aa], j);
					for (h = 0; h < 6; h++)
						if (T1->qu[h] == k
						&&  T1->ty[h] == j)
							break;
					if (h >= 6)
					{	T1->qu[g%6] = k;
						T1->ty[g%6] = j;
						g++;
			}	}	}
			if (g > 6)
			{	T1->qu[0] = 0;	/* turn it off */
				printf("pan: warning, line %d, ",
					srcln[i]);
			 	printf("too many stmnt types (%d)",
					g);
			  	printf(" in selection\n");
			  goto degrade;
			}
		}
		/* mark all options global if >=1 is global */
		for (T1 = trans[n][i]; T1; T1 = T1->nxt)
			if (!(T1->atom&8)) break;
		if (T1)
degrade:	for (T1 = trans[n][i]; T1; T1 = T1->nxt)
			T1->atom &= ~8;	/* mark as unsafe */
		/* can only mix 'r's or 's's if on same chan */
		/* and not mixed with other local operations */
		T1 = trans[n][i];
		if (!T1 || T1->qu[0]) continue;
		j = T1->tpe[0];
		if (T1->nxt && T1->atom&8)
		{ if (j == 5*DELTA)
		  {	printf("warning: line %d ", srcln[i]);
			printf("mixed condition ");
			printf("(defeats reduction)\n");
			goto degrade;
		  }
		  for (T0 = T1; T0; T0 = T0->nxt)
		  for (aa = 0; aa < 2; aa++)
		  if  (T0->tpe[aa] && T0->tpe[aa] != j)
		  {	printf("warning: line %d ", srcln[i]);
			printf("[%d-%d] mixed %stion ",
				T0->tpe[aa], j, 
				(j==5*DELTA)?"condi":"selec");
			printf("(defeats reduction)\n");
			printf("	'%s' <-> '%s'\n",
				T1->tp, T0->tp);
			goto degrade;
		} }
	}
#endif
	for (i = 1; i < m; i++)
	{	T2 = trans[n][i];
		if (!T2
		||  T2->nxt
		||  strncmp(T2->tp, ".(goto)", 7)
		||  !stopstate[n][i])
			continue;
		stopstate[n][T2->st] = 1;
	}
	if (state_tables && !verbose)
	{	if (dodot)
		{	char buf[256], *q = buf, *p = procname[n];
			while (*p != '\0')
			{	if (*p != ':')
				{	*q++ = *p;
				}
				p++;
			}
			*q = '\0';
			printf("digraph ");
			switch (Btypes[n]) {
			case I_PROC:  printf("init {\n"); break;
			case N_CLAIM: printf("claim_%s {\n", buf); break;
			case E_TRACE: printf("notrace {\n"); break;
			case N_TRACE: printf("trace {\n"); break;
			default:      printf("p_%s {\n", buf); break;
			}
			printf("size=\"8,10\";\n");
			printf("  GT [shape=box,style=dotted,label=\"%s\"];\n", buf);
			printf("  GT -> S%d;\n", is);
		} else
		{	switch (Btypes[n]) {
			case I_PROC:  printf("init\n"); break;
			case N_CLAIM: printf("claim %s\n", procname[n]); break;
			case E_TRACE: printf("notrace assertion\n"); break;
			case N_TRACE: printf("trace assertion\n"); break;
			default:      printf("proctype %s\n", procname[n]); break;
		}	}
		for (i = 1; i < m; i++)
		{	reach[i] = 1;
		}
		tagtable(n, m, is, srcln, reach);
		if (dodot) printf("}\n");
	} else
	for (i = 1; i < m; i++)
	{	int nrelse;
		if (Btypes[n] != N_CLAIM)
		{	for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			{	if (T0->st == i
				&& strcmp(T0->tp, "(1)") == 0)
				{	printf("error: proctype '%s' ",
						procname[n]);
		  			printf("line %d, state %d: has un",
						srcln[i], i);
					printf("conditional self-loop\n");
					pan_exit(1);
		}	}	}
		nrelse = 0;
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		{	if (strcmp(T0->tp, "else") == 0)
				nrelse++;
		}
		if (nrelse > 1)
		{	printf("error: proctype '%s' state",
				procname[n]);
		  	printf(" %d, inherits %d", i, nrelse);
		  	printf(" 'else' stmnts\n");
			pan_exit(1);
	}	}
#if !defined(LOOPSTATE) && !defined(BFS_PAR)
	if (state_tables)
#endif
	do_dfs(n, m, is, srcln, reach, lpstate);

	if (!t_reverse)
	{	return;
	}
	/* process n, with m states, is=initial state -- reverse list */
	if (!state_tables && Btypes[n] != N_CLAIM)
	{	for (i = 1; i < m; i++)
		{	Trans *Tx = (Trans *) 0; /* list of escapes */
			Trans *Ty = (Trans *) 0; /* its tail element */
			T1 = (Trans *) 0; /* reversed list */
			T2 = (Trans *) 0; /* its tail */
			T3 = (Trans *) 0; /* remembers possible 'else' */

			/* find unless-escapes, they should go first */
			T4 = T5 = T0 = trans[n][i];
	#ifdef HAS_UNLESS
			while (T4 && T4->e_trans) /* escapes are first in orig list */
			{	T5 = T4;	  /* remember predecessor */
				T4 = T4->nxt;
			}
	#endif
			/* T4 points to first non-escape, T5 to its parent, T0 to original list */
			if (T4 != T0)		 /* there was at least one escape */
			{	T3 = T5->nxt;		 /* start of non-escapes */
				T5->nxt = (Trans *) 0;	 /* separate */
				Tx = T0;		 /* start of the escapes */
				Ty = T5;		 /* its tail */
				T0 = T3;		 /* the rest, to be reversed */
			}
			/* T0 points to first non-escape, Tx to the list of escapes, Ty to its tail */

			/* first tail-add non-escape transitions, reversed */
			T3 = (Trans *) 0;
			for (T5 = T0; T5; T5 = T4)
			{	T4 = T5->nxt;
	#ifdef HAS_UNLESS
				if (T5->e_trans)
				{	printf("error: cannot happen!\n");
					continue;
				}
	#endif
				if (strcmp(T5->tp, "else") == 0)
				{	T3 = T5;
					T5->nxt = (Trans *) 0;
				} else
				{	T5->nxt = T1;
					if (!T1) { T2 = T5; }
					T1 = T5;
			}	}
			/* T3 points to a possible else, which is removed from the list */
			/* T1 points to the reversed list so far (without escapes) */
			/* T2 points to the tail element -- where the else should go */
			if (T2 && T3)
			{	T2->nxt = T3;	/* add else */
			} else
			{	if (T3) /* there was an else, but there's no tail */
				{	if (!T1)	/* and no reversed list */
					{	T1 = T3; /* odd, but possible */
					} else		/* even stranger */
					{	T1->nxt = T3;
			}	}	}

			/* add in the escapes, to that they appear at the front */
			if (Tx && Ty) { Ty->nxt = T1; T1 = Tx; }

			trans[n][i] = T1;
			/* reversed, with escapes first and else last */
	}	}
	if (state_tables && verbose)
	{	printf("FINAL proctype %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
	}
}
void
imed(Trans *T, int v, int n, int j)	/* set intermediate state */
{	progstate[n][T->st] |= progstate[n][v];
	accpstate[n][T->st] |= accpstate[n][v];
	stopstate[n][T->st] |= stopstate[n][v];
	mapstate[n][j] = T->st;
}
void
tagtable(int n, int m, int is, short srcln[], uchar reach[])
{	Trans *z;

	if (is >= m || !trans[n][is]
	||  is <= 0 || reach[is] == 0)
		return;
	reach[is] = 0;
	if (state_tables)
	for (z = trans[n][is]; z; z = z->nxt)
	{	if (dodot)
			dot_crack(n, is, z);
		else
			crack(n, is, z, srcln);
	}

	for (z = trans[n][is]; z; z = z->nxt)
	{
#ifdef HAS_UNLESS
		int i, j;
#endif
		tagtable(n, m, z->st, srcln, reach);
#ifdef HAS_UNLESS
		for (i = 0; i < HAS_UNLESS; i++)
		{	j = trans[n][is]->escp[i];
			if (!j) break;
			tagtable(n, m, j, srcln, reach);
		}
#endif
	}
}

extern Trans *t_id_lkup[];

void
dfs_table(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
{	Trans *z;

	if (is >= m || is <= 0 || !trans[n][is])
		return;
	if ((reach[is] & (4|8|16)) != 0)
	{	if ((reach[is] & (8|16)) == 16)	/* on stack, not yet recorded */
		{	lpstate[is] = 1;
			reach[is] |= 8; /* recorded */
			if (state_tables && verbose)
			{	printf("state %d line %d is a loopstate\n", is, srcln[is]);
		}	}
		return;
	}
	reach[is] |= (4|16);	/* visited | onstack */
	for (z = trans[n][is]; z; z = z->nxt)
	{	t_id_lkup[z->t_id] = z;
#ifdef HAS_UNLESS
		int i, j;
#endif
		dfs_table(n, m, z->st, srcln, reach, lpstate);
#ifdef HAS_UNLESS
		for (i = 0; i < HAS_UNLESS; i++)
		{	j = trans[n][is]->escp[i];
			if (!j) break;
			dfs_table(n, m, j, srcln, reach, lpstate);
		}
#endif
	}
	reach[is] &= ~16; /* no longer on stack */
}
void
do_dfs(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
{	int i;
	dfs_table(n, m, is, srcln, reach, lpstate);
	for (i = 0; i < m; i++)
		reach[i] &= ~(4|8|16);
}
void
crack(int n, int j, Trans *z, short srcln[])
{	int i;

	if (!z) return;
	printf("	state %3d -(tr %3d)-> state %3d  ",
		j, z->forw, z->st);
	printf("[id %3d tp %3d", z->t_id, z->tpe[0]);
	if (z->tpe[1]) printf(",%d", z->tpe[1]);
#ifdef HAS_UNLESS
	if (z->e_trans)
		printf(" org %3d", z->e_trans);
	else if (state_tables >= 2)
	for (i = 0; i < HAS_UNLESS; i++)
	{	if (!z->escp[i]) break;
		printf(" esc %d", z->escp[i]);
	}
#endif
	printf("]");
	printf(" [%s%s%s%s%s] %s:%d => ",
		z->atom&6?"A":z->atom&32?"D":"-",
		accpstate[n][j]?"a" :"-",
		stopstate[n][j]?"e" : "-",
		progstate[n][j]?"p" : "-",
		z->atom & 8 ?"L":"G",
		PanSource, srcln[j]);
	for (i = 0; z->tp[i]; i++)
		if (z->tp[i] == '\n')
			printf("\\n");
		else
			putchar(z->tp[i]);
	if (verbose && z->qu[0])
	{	printf("\t[");
		for (i = 0; i < 6; i++)
			if (z->qu[i])
				printf("(%d,%d)",
				z->qu[i], z->ty[i]);
		printf("]");
	}
	printf("\n");
	fflush(stdout);
}
/* spin -a m.pml; cc -o pan pan.c; ./pan -D | dot -Tps > foo.ps; ps2pdf foo.ps */
void
dot_crack(int n, int j, Trans *z)
{	int i;

	if (!z) return;
	printf("	S%d -> S%d  [color=black", j, z->st);

	if (z->atom&6) printf(",style=dashed");
	else if (z->atom&32) printf(",style=dotted");
	else if (z->atom&8) printf(",style=solid");
	else printf(",style=bold");

	printf(",label=\"");
	for (i = 0; z->tp[i]; i++)
	{	if (z->tp[i] == '\\'
		&&  z->tp[i+1] == 'n')
		{	i++; printf(" ");
		} else
		{	putchar(z->tp[i]);
	}	}
	printf("\"];\n");
	if (accpstate[n][j]) printf("  S%d [color=red,style=bold];\n", j);
	else if (progstate[n][j]) printf("  S%d [color=green,style=bold];\n", j);
	if (stopstate[n][j]) printf("  S%d [color=blue,style=bold,shape=box];\n", j);
}

#ifdef VAR_RANGES
#define BYTESIZE	32	/* 2^8 : 2^3 = 256:8 = 32 */

typedef struct Vr_Ptr {
	char	*nm;
	uchar	vals[BYTESIZE];
	struct Vr_Ptr *nxt;
} Vr_Ptr;
Vr_Ptr *ranges = (Vr_Ptr *) 0;

void
logval(char *s, int v)
{	Vr_Ptr *tmp;

	if (v<0 || v > 255) return;
	for (tmp = ranges; tmp; tmp = tmp->nxt)
		if (!strcmp(tmp->nm, s))
			goto found;
	tmp = (Vr_Ptr *) emalloc(sizeof(Vr_Ptr));
	tmp->nxt = ranges;
	ranges = tmp;
	tmp->nm = s;
found:
	tmp->vals[(v)/8] |= 1<<((v)%8);
}

void
dumpval(uchar X[], int range)
{	int w, x, i, j = -1;

	for (w = i = 0; w < range; w++)
	for (x = 0; x < 8; x++, i++)
	{
from:		if ((X[w] & (1<<x)))
		{	printf("%d", i);
			j = i;
			goto upto;
	}	}
	return;
	for (w = 0; w < range; w++)
	for (x = 0; x < 8; x++, i++)
	{
upto:		if (!(X[w] & (1<<x)))
		{	if (i-1 == j)
				printf(", ");
			else
				printf("-%d, ", i-1);
			goto from;
	}	}
	if (j >= 0 && j != 255)
		printf("-255");
}

void
dumpranges(void)
{	Vr_Ptr *tmp;
	printf("\nValues assigned within ");
	printf("interval [0..255]:\n");
	for (tmp = ranges; tmp; tmp = tmp->nxt)
	{	printf("\t%s\t: ", tmp->nm);
		dumpval(tmp->vals, BYTESIZE);
		printf("\n");
	}
}
#endif
