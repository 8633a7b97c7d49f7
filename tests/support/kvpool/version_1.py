"""Tiers as the last program with format version 1 left them: written by its own writer, killed in the end.

The node's list has the namespaces a = 1, b = 2 (cleared), d = 4, e = 5; c = 3 was dropped. In the first
segment, number 5 means another namespace, of another boot. Every page has 100 bytes. PAGES are the pages that
counted.
"""

from __future__ import annotations

import base64
import json
import lzma
from pathlib import Path
from typing import Final

LENGTH_BYTES: Final = 100
PAGES: Final = {1: {0, 1, 2, 3}, 2: {12, 13}, 4: {40}, 5: {52}}
"""By number of the namespace: the pages as tier_tools.page makes them."""
VOID_PAGES: Final = {10, 11, 20, 50, 51}


def write_version_1(kind: str, path: Path) -> None:
    """Make the directory of a tier of this kind: "ssd" or "directory"."""
    for name, content in json.loads(lzma.decompress(base64.b85decode(_FILES[kind]))).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(base64.b64decode(content))


# A JSON object: file names to contents in base64
_FILES: Final = {
    "ssd": (
        "{Wp48S^xk9=GL@E0stWa8~^|S5YJf5<HYO^`dt7$h=Lk}5rD>~iCHX4h?iWqV4QLPICJg*>P^<HvngRW>F^nzc%=f?)ndxp{H*+n"
        "^8FOOQEz?T3*(_)$0EJLN_L=0#gu@CJ*4Jp4{PmHH@cG=Ms{bI%j>@oKkK&kIjU5#Z6*}1rN%8kKz}Xv3z38Y5)llXJMP?^cQ_gd"
        "?-T<+ejY?ZBmG^8`Qy|iAv2vHf5?K=VcO8-7bplc`e9@X4}iR?BSa**MJi<?!cS*dGvdpwJ&`0#i^Us78;19)fv&TxQ8*UeGsx8k"
        ";-`w9)fgDY_s5G~>C6x$$Los)4qB|!;ctPhI<#ufC5@q*G5~t1U>(u63f{aizu@#ZMratyB5ln);dSeu<sl&WiLEoJjXQyXuVlTM"
        "hO+H_9X-S;OW^RiU<=$EVOI(kV}jLB5aVy>bDa`vPpi~}U)xj%iJBN8!ctu@r1kt^)hmXKSVKk%#;!|~M8v83Wa$O$P%E41mb$oG"
        "+-nqZca~9`!Rjx@zjDIzx~$D!mZeO7bn|prm!mlFg&mweO$NRn29Xg`DE(sFpm&%<$9j9u)S>$nBIqJn%rLc{PL7i$DEqZStX#Cc"
        "Iq31G)JvGMqCBZO=k|UnVY-_~yG_PCOucq{tVDc`>|(_%htA4;9v(!E#@I##FKoOqd^(Y{7Eo~tgUkFqNEYl8Ya4q`?JSGa2nhN%"
        "%{c*IygKhi1vW2-6I1CN(D#HJ^Y6M>{djsX)Ri@%GpMEA`Ec-1E#aHIgS|=Fm!ul$b@}iX&S9WJ-mCx@c+Y6f^q6P58K+R6IjwN>"
        "Vo7mME`{ugj;qYPVpC}o?(Q&nK5C>fAj{YGAmqTAWf@VRnxr8&kkqs44XS72qKN4>1Whc1I6UyQH+DMAF3gNbf4|%uc&;@oX8tBV"
        "U7yCliiepmCIWZ@)5QL~c9IMM#2lLcFgJJ$6XJXZCb)9GDlwJeZ{v#kOAE@O2Vu{v>9SSc7FOU6P*2}0%b_ohsP`@&=%*hXo~EMI"
        "5-qt0#0BjkFm%@IxU-R#B4#Ih1k@%--lhBF?B{<h`CnzTis_@R9Wq9F5_p%T(}I^f{YLTB2LBAq_iVBEoYtL9n@_{mrYYv&xjv?5"
        "#Zq4;rj}#9+u*c7@+Pl*wpy2)+gRiO12BBNNUR_`hbs`(_uKSMaH-H~ByG<|c9Ffyfx#clq>mvN)I5~XY}`aWMTi33<y*xj1TQHX"
        "8FqWfxDkq)$6B^KQmKE`#tYV7&o^@P>K(;nZ|OGP*tii~Sq>~U-9FHFbSSxSqe2u8HL)UFzQe%=7a{J^cMaBkM$}Kdbc7=<5Arv;"
        "WZrwq`a+cinhH1`F_88q-E~bv3J{jVTCh*M{ZX-F$k|SQh3fqhSBefLHT!S?SYXFV4jQ9oMRQM-MQeYmZ@tb^T5@neELc>PwA`&Z"
        "<f0<we2R+fu=$e;!sBcH@=A33G2kfxPnDUPhbD4UNXGQA2)<$#i5!W<oX%J!d_MO-T1uayRr5IaAa>^NuqN)$|C3yk*BsX?CrEa4"
        "HvH=7K|kFnQMt_FEHCog#+>G`rmlNY3)rdq;h(1v90Q76p(&K%Tv1O`V3YC$upm#~gMq=!{p-W*R#9WrhU;~LH#1K(>MHZbLeHf+"
        "?$}5OdEmj7dBx-)w+WaJKeY~EN(QixxXK_cCUGt$4+>W6Sg~x*zb<T+>v}QRfoq4$p3d&6KIX$D@EJbJ%z`PSv=W{`=!UQxPJ|0?"
        "6m+i?i#lwd<6`G?M`9v&DwhY{j#PRK6mLHL{L1;%B?rn&IJMS0Aw46v%^(C2W=CKvEv>c|^9Xsq$1|LK|EhF$Qw8A|X?yZm5^b*+"
        "WV@6}{_YG5r`*{PM_??Cq_o}g-Mi&8?FCOKFnGo0O9v)sO;?NLHRXSZLz?Z)Z@bRK2y;jAI8!CP02~v9QqAxL-nhfsJ4HwRCkK$#"
        "cn_0p@0YUF?wP9SysHx;HHpptGXX`eI+e9|fbtG|8U)J*{Su3)2=bk{B{9#mIfVr{q>TsEOd1mFV1`!%=>I>AHJ9XB?RPrZ*<91O"
        "<F-CxardlbmGKXIX_A4Kg9@1>4A&2Q3!?qqda3(ZEd^Q9g^v&5+YP=EsVm3jzrJS=<v{eQLT)DmvY?@wUW8z?ofbCWsXGtzy!Y>@"
        "Gukfq)?@U6Rruh~Nzy#wH+)oTwLO%aQ;KE+*gRwI7WV(n?<A2T{=QLCwP2mv&WDLPBqN<EIZ=PjuRWoJSjkC4#OP16IF$mC(mmft"
        ";0-l1AXSk~bEmpYER<<QGr==I2&~Ac#G+dUDVOAn`$ztUbje!Q7DcUzwR>i|@W^*sNqz<i9ZsBeVvf%~{b#X-_{12#YR{)Y2K;+a"
        "dHAzzP<U&yBK@LzjU5*NnvuuD0t`Cqey58XDMw76=l$OAc}kN_1Kb&kr6e;N3xpGM<-uuO`f3x0V66;Kp{=88p=HDm9gzyQh?FMO"
        ";#dWbF+N|TPf0<jXs66)dWet$qEAs6MzTFNPqsuz&s0L>Pk#9}d3|*;k$BFVClx-0_0vhgO*T1P^~mH$%jBoWM0|<}`Zz=Ah5qGJ"
        "xn=Aen7K0LnBS`blyqYAMgE<~<eCiTXx@@07~);%$Y@|8?nShN(A7WsV}M$kz_B2~RX|t{qtpY5AGQE^??Gu){sX>OU^9qLf}F#O"
        "V-&#aKN*ZNu9X0o4NKFU-v4Rq@PqA{rK;{n{Bb-tKay5VlR`I%`)4)0drKgQNJ}!I$~H0-1sJl#21f5S(iw4Y;-mRSO-GTChdLOU"
        "!`Y^4wIoCCB3lp%+cgW(G|2FLx3@ZZ{&92)|8+>`XeZJfPxOyiH~Q4_XCBH2AfO)k@rjIiP)FPJZAgb~)Jnd|*+cn&^}V6)2QCK*"
        "vguE{pX1wp#Chogm0ZZltW;L}dq_HE98#ua&&^5QmglbTL=QkXE?1L67BH1zs`HT?Xt=8{H@~~Glc#9PPs>9Ee5=&AL=F|!xee1U"
        "QNEKgE9F2{In#!F%|5V^;Al(R=GD}$np0HVI0Ece_(|iR(0hCGqm&N~M9Kxa7p%oOB~xy77@nc``38g*vtgI$Q6cmtyjMgtd~Mbd"
        "wX>Q5Jv8PYLP7f`rp&vLxV)D6l+>jD+Vomo=yy(Ac#jjgJh9eKxhH&%iq6_(lH~Ffx+=d%Z1uX*N{vDI2tx;#FkVMWUa_O6U37?M"
        "EvQki+W^jbm}_1O+-l7{oZ0BEVkh+xwY)`Og?K^<h)?WNI`=O)M55aX7+T6M-gIw&mJIapM93~Eo^^aBAhm!)CT>;exlbd(f@wWt"
        "l}Ea?mS*u5^4MiGTx<C<S6v=Jin{f1^IAn?O@@~pEA>P#-{=*ZyoF-tuLR_(zWTs1-H|5wJLl%WLFS>=WFyzur3uilJ6*{ngV*-L"
        "P(WLjQjPN8k{(-sN(;I4dacl$FH=jB?wFjnsN3vZ$YtDw1-Z-vRWD;lWPpQjnWiMok+?ADPuoaVf_7J$N}UD>Fm~mmQM8D);}NrH"
        "lutp!LH#>IZ@c`GTHLy}wv@d5?oJ!pIPgC-UY7ci2)5hG74*Vn7_zF8*J8n5<c_6o)a7BHN?-?WMqnXFJwfP~uTL(5qld=*?$}mN"
        "dOg)l$oGPp&MG+a@ibDGG$gDMC46NE990zY6mOQL?7BF81nLR_3(V63M&5wr?cizR8#WN4VHjhHFIR~i+|lQVkZh^Ls5)Lg5+Qc}"
        "lXjy|F&B$6x1I7Xe(H1Hx-?+veZ`+gf?%yi;AYy9FHm`NlG2`OdHnpLOn#mZkU?kV!0_W$)56v%>NMcv4<zj$G$bsQT;;4UM?#m9"
        "b20wizS=$dAUkGq#Wt#3g9P4;5vK`?OlGUR;F9SWrocpYZM!2#Pj{p)Do$)=4SxF%aNdRWq=R6lZ5hhMW<d{cQDEokQH!1TNyvA;"
        "+`$nZ+@1VO*%@7fBrjB?%v9y8zO5YqXk#y@hX*L#Ng;^q6nrKBRxvNvw*hW=b?-oB=DYAYtGj$SYEBu%fdFT&%m$naNd4HJyTlSB"
        "8$4XrpM?VX#>~{!t4cYh*O00aH*4ni3lk;w@?p$`A_xS{FRex<ZpEQ%e|c;m@jFUmTjqn`Tz3`VvF%JQKvvL`%^%-Xe0_0|bhhJX"
        "P*GlTBtvCo+o#=ZeF4_<<>ou)4iNp?K>L6EOYqUNw*5i2HFel3*?mZbB{M?zX~tuT3g3tHN3tn_D_X_$Zxo<*)&!c7JkaKAbo7dN"
        "@A?jm(Km;^>WmdT4DBKK?wMDd(qoJwLok1j>r%yRocrX*Y(B|Ihijbhv-E$(w*Pf?8&xqQK+y#t;JR&~H+XZ%v(L{$G#C;KW^7Z)"
        "OY)`eb|jcKta`D{%(KQbrZkIq?n;Y(KvAS#qyk<j2*=)HGtmI-l<MYoLG-+RTQWf^R94L7eg55ok0s--<WYL~YhNaAEm@h7vK@1L"
        "1G}ORaQlkyPf7_jAy;4_UXJ<(XRw*ZbrBDk>+A<fOG<u-XznvYLY<2km@TnAVdi7A>j!loc9i{NMhG$vL|EQAZ(MApDiM<!V6H6i"
        "2~)-zpiTSCXbz~BGRR7%SKuN_dGI!?SZzGj^DM;jbYJ7}Yjonxy@kgd!cT4qpm?bOs7r5%QDAzvK;jyNy>qZRj$S}eIS>y!NjciP"
        "07yW48a4(^!TaQDlaD}D5@bYX;=ltm@sX9)*XgQXyA)hweIE?*(oe-L3W^xx*pO8u8!1a`Q{Z0)P?svb#WdBntg17AjEj##N*WLT"
        "ulTnh;eff89Yr8^VG5yx1$%J9ec77qI--&$i<xrhe2384?X_Gt=)7H?f^s*sQmD3gcJ*-ORqW%%gKeq1p;Hajz-m<RMwYt#a<oe2"
        "i<$-jDtzJh!;-hz7;-qEOhSG$-Nb2<;^^jr*K|vIQO)FbiJ9V|{m}O3ar&bhf@TF`=fJOlr(qTnCDJJ^Nx#F+=_0OGdP!>!PsHs?"
        "9u1}!p5m+Xf(dh!D)KafI@)H4>JWS;Pyhe`N}t0bLHxCd00EXB?THTnMXl4CvBYQl0ssI200dcD"
    ),
    "directory": (
        "{Wp48S^xk9=GL@E0stWa8~^|S5YJf5;Uv%wMqL0sh>6BjHpD5Y<b(Evk7#z@KFayDewhWw5cCQ&YiuqAE*=bB0`M8##fu&$eE$cD"
        "YG`7xKV;d3k_s~bm%VXpo+HZQ0Yv1<@8RWUNowO}Rc7o1Qho5QWJ`z4kbrk(<6PwWu*pTJJth~}Zy~M?4Eb@xJfN7d(Q1V{`wZ*m"
        "P_)$$*``1}*n0+HkgT|0-AeKLGIl+i^2ny-5oOvuVTib$EX(q#j{<(MP6Wd@om7JI%)FVAp@W7^4fzVE(GxKzQ#JT&!so7pLhu8X"
        "lIt;J9?}}<!^al;XfjJi*1}7@cv+hy)F^N5pk(k)=JsC6bQ+sJ?Og`14%C`KRr64?S6b@33*N_P)X~SRS;mI&^a&FwrB-v>Y=X%{"
        "r#i9v*i%0X`p(u;jH$&ABT2ULeeF*f<8+pGt9@lWxSHtlUpM?O7RARcq#C$OWGfH|sKy9t3Vs4;DoHI7RxR(bwd<UmRz4IqEyZjj"
        "AgV6>X3|*Rik`nv6!w_2Nbw6Z(`g1C-vw!FvHWDV$Wyk=8xt!8Gy->elLK^SZJ`WlELLVbv2?j$*3IfmrZZR5kNFk-<TrS)u$HMS"
        "XpX)_orMk;kW+LTd&)!^{Na1t(cZrGvo}7t26BBHZ-3DCsX<ypzPz>`S-5#8)5A~{^;J<*WN+#kVUq-do(#*?HrI_D{vxm|Z~2Sx"
        "4HG_|w?%PomY~|N75fIf@WOKF4Ce{tI>|fXmy`)VPDF`|z#XapsuWA;5d2F|J1fPqFNt+GQ0Nh);Y?nk{Y;hEPB48L9f?SDUlmFH"
        "V`mrVPF@MJ>u<j}dOkdlc5VrBLI?Lz$Hha!qEN(j*LC5=24Mky_@#IBO$?eaCRsFL{LOlD(|1iFUj}N$FNNrIy7qU8g~eBewqkO{"
        "KL*hr74wEY&#M9?%@-%`=vYWIYiJc0Wx#jyCdI=xLZ@iAY>8Du^QtXw3hE}A%M?~tNCHR3WJsSe6S0Cj!AyfdJxLXxFW&YR2BMWB"
        "?Us?J%E}?Eu*E+1fmo7X=+oX|Fe!)JMdWRZq?Ogno*)Zl3{IEQ)Gi$B4&j6pAlr@B6k@ja7oMM4V^#TMwRn9v=*_%FO8<_<VYCZH"
        "^I2VPaaniE!>1+pk<L{WEFCxZW{TAff4dk=$@*RR)eqeb@WWdo_$KVa0EJ6}of5PS<kvaIS708>JXycJ@fA}80^zTwc|ETICcJG9"
        ")FPR{B{jn?z6>@+O;V>nOZPgrJZ=1Z^Mj5pj*P4@K4bUHNiNi%fS=P1CWFCg-yh*KSUim{diw0+EI;+u=YP?oqW6&TG#3<QzC9uy"
        "4o%)qr<bMC)1>Mb+3H&g>aCDFee~_`NK3q4OGWrH%@cQ40xNrv4shQ5TrL+b`tXCcH@(&RtDYRyW>Ei{z(4>7M~jsAb$__~#A(Xg"
        "srfvYyp+aR49rFTznMspH>#<Gjaj8NMb7)Q2dMsq!0KJu$7v0gnrUK@f>))`N`6z(y#1tsgi?i4wZB%8*D@{ScK#fjm9|J3pEC>2"
        "n&39F>W^_T-kLSCsGOVxiW?yk>mafUC~FyqDW*^4w^ZL;NG~ZS+OZsJeKQ~IV&3NRBBO){zkH%oZBp&Ex%u&;O&CF}l(qgt9mbh)"
        "#%cF+IT4o4msbA<RaIp&$jFyW#_cLKs!OK1wQCq&ehKWE4o+`h?gc7$71Tzws)@Aw8lGORX3R%b@-`(_4b<9(=Xfyq(Fb)-qZau6"
        "<DL3V_w<gLtga?f73>RD=mL4Xgb(27)YTi>)pA6zp}=!8*5C)p89!1LD={Rjl0S*3K^rCamtLXw4_gd=8h=jLoIgW+n)U|)v=zbm"
        "ImgM4OL9YM3-AtG$J6%Q`DDF}(m>OdLe?%YW~t{AxD@9h^z>j;5B}4>Kk+SEhcTx(qwV>S5OBX!uYc;^bqZTX?AMOFDeFHNsC6;{"
        "V4|36euMWd%q4bB4uDNw_KFJHV@aO2tJSq?VX7BUuWaYXyXXWWuhqC!(-Sg6aVj6#2;%{+fF$i!1fM+Om5P#+B=(72%2TtTxk-g>"
        "!7uX{EYD2ct3IlG>bBO<-lOb8Ka$()2m06<)i^DW<7Yx$y?yTR4lV4DQlfBo4Fdn&r>+KuZ^>T&ZeH<SWYdXiWTrSY;oQkTDb3>h"
        "-fbokW5sb8dv@=k)~vPe$-Ipvb|jr)uLnM3`-TAHt$<HjbR$O65r8U4#_hE%yGmI?&4c){cH02ax};`P)djCgse}{y;3edqv3akP"
        ">vZe7YA!6(ni7?f83JUHSo$g6whnZZgNY3PC%(paC}b`+WEJB=Y~=lqP3yLmPC#(XDXJiqOds2^GH46CLNmb7nhs(%kG#oqbFj*q"
        "Cr#sINh;Zs|Bp;Pp&x&WKfE8WOVQ<o$1O5;w|bCM)o9Ip6zd&aYVm7y|8>mhP&2-%M9u&^<4j;cky8)mVCs&;u}c_vk%t7C^k%KV"
        "3|E+eQ;+0ma56-@kL(dUsVrm&9lofjB!{L`ql35@so+AK#rgx2%=PPbsuhxE0y9L~04e?eHa|Mqn)MNsYvjNhNACu#5gY_4-m@CO"
        "1S+nPs^H=2r+;K1YK}NcG$MTw23e@utV}zPXu_lZum+o!^8^3YGCxr1taLI^S1(o{JCna|y-KO_LgX(4DrNuYkkTxA94MM%GhRg*"
        "*N_j=TfAu!<|DIU(`O#Qo0bDOd}Q~)VU!SXVdRy^$Q6W39V{<xMX_#4o5DTKL6Jq<60C_d-wi^v#hVEnxmVV!=S-B@MH3`WLamEU"
        "^0wFiXOcNG%H9edSwvQtMTofi1xWna`ocf9?w-)}Sk`}bk?wwAM5+YSnJBe>+3*w*b0vJ0Dk?ix#FXeF@B!#W?|;fZR5xi(7?8dq"
        "%7F<f3nC9<wE*fgO0&`zr^-+l>SoKMj4oexpzYA>@8i+CJ~`h$8IU6&=D-w1KP4AKEWR~p#s}f*kd=aODc?;A2#ow>!`ftHoKwoV"
        "Nk|4%zCeZgiYn@qOJY7G&A7F%NF_|HD-*%B$?OXm#2IwJfuH$Wc>KJlOKfhcEH~_Z2`11KymFTLae~^1eq{8_Lx_$hVIl3TjGZ(Q"
        "Y)d=YzC?wb4Eq6|N{C#^CE*D5YH-F++vnN-@Z~y&Qy-4!L_EzcfNEiJk~_d>I*X5~nMIw$p8vFU3G}j0i@>UhmR%29RXtc`0yN$1"
        "tvNv>fDvKQqruU`{tp`fhtwO?IMuao&rl-`@+UB)_y%$vY)l<Yh)oxgI2mw+K8x()jr{<1YIHX}b8Z<qQW#?H>o!wp5rM>ZBWGo("
        "hG6*Xg<r3`nl?-|(X$gatY6IU7N)K%;&9IC+xBPyFO=Uj=!=ke15-p~EDJE-lZtP=jjmS-7@W42bY`T`gAm2La?@ysc!_~!SWA`="
        "bF?Vt?Fx<-atDSwjK3H)O^pW^ATW2-Q295V-xX1RbLih_q&%=~4Ct4U^SFd@(dCP!E+*O1z(4d668zpiWK8bju?XK2@Bg;K6wmcN"
        "6HgN-wv9a<qA|<=0JHaEUKtMT5HO+z;6BNU_Ei*q<Y1v3)}+yHb_e3j|1ZDW{uP%k)V;a_TF4fS=Pl_u;I>C>b64>#@eZr$1X8G!"
        "R+|&;_X32{>Pary?9#t*oU7mt1lRd_Ey7{*_@9ygAOL{95Y%;sR76eK4m~=*;5R>}sOs+b!=KWsOOt46=PWbr+wTx3qbd=A008)A"
        "6Mzc-zhoIo%fbf-RTZGMLjh|5C>OD!eCf1~EkdxwIy*PQh&F!`fN4yWOMIkK49rsATE*DKX;T9sxMw2ck-|Anujes-gGWju=>8|m"
        "DTICNkI%SoZ!W(5;mZOZlucN@IBw(18e(GV!!U8N6&T5b-F$DNGT+e8Jg|aP`Ne|xGu&M6Z`R}KS1;Xg(oCIxRp>sZB+EZIk$egH"
        "%Y?ERpwr0hD+s9wp1)e}g4a3<w=RV(d1GP+ZH#aMV9eQ9XaJ@1UWwR&=Won%ByIezF7*4$A9ezL@ot-IKcj!P72nq!;b#0-AeO5>"
        "+q*4sZiP6yMUG_t)f@E8Br;T7BqXa#E^{BPlgKc(a^t5KR!FE5ffwB4*BX(29l@tC1Ege)vA}9^P+G}?TlQ*%qhuRiF<uRJ2jRB|"
        "hUw$(2LYOqevXv-=E@rOSAEUaOiD}x{n_|!aLh7<sUNxo7lrx$i6t6TV4AdE)r<S3oUf2>KD{o*JRG~hTHQW8TiA2*5o=N*=s^Gb"
        "aapxSE{a{YIcVRNTn2HZDI)H$iwJW7EM|XU%crZXjx+a+6g5EMJ9XU|VA9AV*l60@pj?G@%lwBp&A*7~`)BZtZ6zZLoD`w0q?77C"
        "tl2tnQ2O9C8NWBrN`T)6NI#Yri4nilYK}}(<dkv<(UEK+l-t)DXXXG~_^3XT4Yk96Si%S<ctBti*uMSysgT4K>wN|ly?RW7=_Jp-"
        "zIyfP+;*a4J_Zv9IEOw%3T9tK_a0Z_2=$t)3^IlN?WM4V-s)fvh1o>?2^)|q!|7K13O737ha<SJ5>qi>Zp329vl5L%XH3@40X#QH"
        "vI0a0_dl`b^i3IzWEz)nyVEW;J)!5pkBL(N_d{_l3gymO9_FZ}HtY~pPEz5;gDgq4QD}@tpnMP<9+WnPEgsM+fbUpO00*+e8&Z#W"
        "7jo<6#xR2|5U4@floYQ7a;5$=xF_(Y@9!vQ9(re!ihe>I%&a|)n=f`!@!(&M`8rZCT7Lt9P(^53qmEt1qwah4G`S@*TD3Ze##`$k"
        ")dgQ>000004Flw1rq^1i00H70(a8h=;G#2GvBYQl0ssI200dcD"
    ),
}
