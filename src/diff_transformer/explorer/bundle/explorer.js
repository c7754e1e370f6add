/* sources d78cd794e5b33b0996d7d362fdb20d87377c3d01fcc85b586865f41ead7b14bd */
/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */
var O,Lt,Xr,ae,nt,He,Nt,Ne,jt,it,at,Ht,Oe=Symbol.for("pv"),De={},Ue=[],Yr=/^m(i|n|o|s|text|space)$/,lt=Array.isArray,ct=Ue.slice,ue=Object.assign;function de(t){t&&t.parentNode&&t.remove()}function pt(t,e,r){var o,a,n,s={},i=arguments.length;for(n in e)n=="key"?o=e[n]:n=="ref"&&typeof t!="function"?a=e[n]:s[n]=e[n];return i>2&&(s.children=i>3?ct.call(arguments,2):r),Se(t,s,o,a,null)}function Se(t,e,r,o,a){var n={type:t,props:e,key:r,ref:o,__k:null,__:null,__b:0,__e:null,__c:null,constructor:Oe,__v:a||++Lt,__i:-1,__u:0};return!a&&O.vnode&&O.vnode(n),n}function Be(t){return t.children}function Ce(t,e){this.props=t,this.context=e,this.__g=0}function se(t,e){if(e==null)return t.__&&se(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:se(t)}function Zr(t){var e,r=t.__v,o=r.__e,a=[],n=[],s=t.__P;s&&((e=ue({constructor:Oe},r)).__v=r.__v+1,O.vnode&&O.vnode(e),dt(s,e,r,t.__n,s.namespaceURI,32&r.__u?[o]:null,a,o||se(r),32&r.__u,n),e.__v=r.__v,e.__.__k[e.__i]=e,Gt(a,e,n),r.__=r.__e=null,e.__e!=o&&Dt(e))}function Dt(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),Dt(t)}function st(t){(8&t.__g||(t.__g|=8,ae.push(t),He++))&&nt==O.debounceRendering||((nt=O.debounceRendering)||queueMicrotask)(Ut)}function Ut(){try{for(var t,e=1;ae.length;)ae.length>e&&ae.sort(Nt),t=ae.shift(),e=ae.length,8&t.__g&&Zr(t)}finally{(He=ae.length)&&(nt||queueMicrotask)(Ut)}}function Bt(t,e,r,o,a,n,s,i,l,d,c){var u,f,p,x,$,m,v=o.__k||Ue,k=e.length;for(l=Qr(r,e,v,l,k),u=0;u<k;u++)(p=r.__k[u])!=null&&(f=~p.__i&&v[p.__i]||De,p.__i=u,m=dt(t,p,f,a,n,s,i,l,d,c),x=p.__e,(f.ref!=p.ref||8&f.__u)&&(f.ref&&ut(f.ref,null,p,f),p.ref&&c.push(p.ref,p.__c||x,p)),$=$||x,4&p.__u?(l=Ft(p,l,t,!f.__v),f.__e&&(f.__e=null)):typeof p.type=="function"&&m!==void 0?l=m:x&&(l=x.nextSibling),p.__u&=-21);return r.__e=$,l}function Qr(t,e,r,o,a){var n,s,i,l,d,c,u,f,p,x=r.length,$=x,m=0,v=0,k=t.__k=Array(a);for(n=0;n<a;n++)(s=e[n])!=null&&typeof s!="boolean"&&typeof s!="function"?(typeof s!="object"||s.constructor===String?s=k[n]=Se(null,s):lt(s)?s=k[n]=Se(Be,{children:s}):s.constructor===Oe&&s.__b?s=k[n]=Se(s.type,s.props,s.key,s.ref,s.__v):k[n]=s,l=n+m,s.__=t,s.__b=t.__b+1,i=null,~(d=s.__i=eo(s,r,l,$))&&($--,(i=r[d])&&(i.__u|=2)),i&&i.__v?(s.__u|=16,d==l-1?m--:d==l+1?m++:d!=l&&(d>l?m--:m++,v=1)):(~d||(a>x?m--:a<x&&m++),typeof s.type!="function"&&(s.__u|=4))):k[n]=null;if(v){for(c=[],u=[],n=0;n<a;n++)if((s=k[n])&&16&s.__u){for(m=0,f=c.length;m<f;)c[p=m+f>>1]<s.__i?m=p+1:f=p;c[m]=s.__i,u[n]=m+1}for(m=c.length;n--;)u[n]&&(u[n]==m?m--:k[n].__u|=4)}if($)for(n=0;n<x;n++)!(i=r[n])||2&i.__u||(i.__e==o&&(o=se(i)),ht(i,i));return o}function Ft(t,e,r,o){var a,n,s,i;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(n=0;n<a.length;n++)a[n]&&(a[n].__=t,e=Ft(a[n],e,r,!1));return e}for(e&&!e.parentNode&&(e=se(t))&&!e.parentNode&&(e=null),s=t.__e,i=e;i&&i.nodeType==8;)i=i.nextSibling;for(s!=i&&(!o&&r.moveBefore&&s.parentNode?r.moveBefore(s,e):r.insertBefore(s,e||null)),e=s;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function eo(t,e,r,o){var a,n=t.key,s=t.type,i=e[r],l=i&&!(2&i.__u);if(i===null&&n==null||l&&n==i.key&&s==i.type)return r;if(o>(l?1:0)){for(a=r-1;a>=0;a--)if((i=e[a])&&!(2&i.__u)&&n==i.key&&s==i.type)return a;for(a=r+1;a<e.length;a++)if((i=e[a])&&!(2&i.__u)&&n==i.key&&s==i.type)return a}return-1}function Rt(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function Le(t,e,r,o,a){var n,s;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof o=="string"&&(t.style.cssText=o=""),o)for(e in o)r&&e in r||Rt(t.style,e);if(r)for(e in r)o&&r[e]==o[e]||Rt(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof o!="function"&&(o=null),(t.__e||(t.__e={}))[e]=r,r&&o||(s=at[e]||(at[e]=to(e)),(t.__a||(t.__a={}))[e]=it,n=e!=(e=e.replace(jt,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,s,n):t.removeEventListener(e,s,n));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function to(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[Ne]==null)e[Ne]=it++;else if(e[Ne]<this.__a[t])return;return r(O.event?O.event(e):e)}}}function dt(t,e,r,o,a,n,s,i,l,d){var c,u,f,p,x,$,m,v,k,h,g,b,w,M,A,C,I,E,N=e.type;if(e.constructor!==Oe)return null;128&r.__u&&(l=32&r.__u,c=r.__c.__z)&&(e.__u|=l,u=n=[],c.nodeType==8?i=je(c,n):n.push(c),i=n[0]||i),(c=O.__b)&&c(e);e:if(typeof N=="function"){f=s.length;try{if(v=e.props,k=(c=N.prototype)&&c.render,h=(c=N.contextType)&&o[c.__c],g=c?h?h.props.value:c.__:o,(p=r.__c)?(e.__c=p,2&p.__g&&(p.__g|=1)):(k?e.__c=p=new N(v,g):(e.__c=p=new Ce(v,g),p.constructor=N,p.render=oo),h&&h.sub(p),p.state||(p.state={}),p.__n=o,p.__g|=8,p.__h=[],p.__k=[]),k&&(p.__s||(p.__s=p.state),N.getDerivedStateFromProps&&(p.__s==p.state&&(p.__s=ue({},p.__s)),ue(p.__s,N.getDerivedStateFromProps(v,p.__s)))),x=p.props,$=p.state,p.__v=e,r.__c){if(v!==x&&k&&!N.getDerivedStateFromProps&&p.componentWillReceiveProps&&p.componentWillReceiveProps(v,g),e.__v==r.__v&&!(8&p.__g)||!(4&p.__g)&&p.shouldComponentUpdate&&p.shouldComponentUpdate(v,p.__s,g)===!1){e.__v!=r.__v&&(p.props=v,p.state=p.__s,p.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(R){R&&(R.__=e)}),Ue.push.apply(p.__h,p.__k),p.__k=[],p.__h.length&&s.push(p),i=se(r);break e}p.componentWillUpdate&&p.componentWillUpdate(v,p.__s,g),k&&p.componentDidUpdate&&p.__h.push(function(){p.componentDidUpdate(x,$,m)})}else k&&!N.getDerivedStateFromProps&&p.componentWillMount&&p.componentWillMount(),k&&p.componentDidMount&&p.__h.push(p.componentDidMount);p.context=g,p.props=v,p.__P=t,p.__g&=-5,b=O.__r,w=k?25:0;do p.__g&=-9,b&&b(e),c=p.render(p.props,p.state=p.__s,p.context);while(8&p.__g&&++w<25);k&&(Ue.push.apply(p.__h,p.__k),p.__k=[]),p.state=p.__s,p.getChildContext&&(o=ue({},o,p.getChildContext())),k&&r.__c&&p.getSnapshotBeforeUpdate&&(m=p.getSnapshotBeforeUpdate(x,$)),M=c&&c.type===Be&&c.key==null?c.props.children:c,v.__P&&(c=i,a=(t=v.__P).namespaceURI,l=n=null,r.props&&r.props.__P!=t&&(r.__k.some(function(R){R&&ht(R,R)}),r.__k=null),i=r.__k?se(r,0):null),i=Bt(t,lt(M)?M:[M],e,r,o,a,n,s,i,l,d),v.__P&&(e.__e=null,i=c),e.__u&=-161,u&&u.some(de),p.__h.length&&s.push(p),1&p.__g&&(p.__g&=-4)}catch(R){if(s.length=f,e.__v=null,l||n)if(R&&R.then){if(e.__u|=128|l,n){for(~(I=n.indexOf(i||void 0))||(I=n.length);(E=n[I-1])&&E.nodeType==8;)I--;for(;I<n.length;I++)if(E=n[I])if(n[I]=null,A){if(E==C)break}else{if(E.nodeType!=8)break;E.data.startsWith("$s")&&(C=je(A=E))}}if(!A){for(;i&&i.nodeType==8&&i.nextSibling;)i=i.nextSibling;A=i}(c=je(A=e.__c.__z||(e.__c.__z=A)))?(e.__e=A,i=c):e.__e=i,i=i&&i.nextSibling}else n&&n.some(de);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),R&&R.then||Wt(e),O.__e(R,e,r)}}else i=e.__e=ro(r.__e,e,r,o,a,n,s,l,d,t);return(c=O.diffed)&&c(e),i}function je(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function Wt(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(Wt))}function Gt(t,e,r){for(var o=0;o<r.length;)ut(r[o++],r[o++],r[o++]);O.__c&&O.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(n){n.call(a)})}catch(n){O.__e(n,a.__v)}})}function ro(t,e,r,o,a,n,s,i,l,d){var c,u,f,p,x,$,m,v,k=r.props||De,h=e.props,g=e.type;if(g=="svg"?a="http://www.w3.org/2000/svg":g=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),n){for(c=0;c<n.length;c++)if((x=n[c])&&(g?x.localName==g:x.nodeType==3)){t=x,n[c]=null;break}}if(!t){if(v=d.ownerDocument||document,!g)return v.createTextNode(h);t=v.createElementNS(a,g,h.is?h:d),i&&(O.__m&&O.__m(e,n),i=!1),n=null}if(g){if(d=g=="template"&&t.content||t,n=g=="textarea"&&h.defaultValue!=null?null:n&&ct.call(d.childNodes),!i&&n)for(k={},c=0;c<t.attributes.length;c++)k[(x=t.attributes[c]).name]=x.value;for(c in k)x=k[c],c=="dangerouslySetInnerHTML"?f=x:c=="children"||c in h||c=="value"&&"defaultValue"in h||c=="checked"&&"defaultChecked"in h||Le(t,c,null,x,a);for(c in h)x=h[c],c=="children"?p=x:c=="dangerouslySetInnerHTML"?u=x:c=="value"?$=x:c=="checked"?m=x:i&&typeof x!="function"||k[c]===x||Le(t,c,x,k[c],a);u?(i||f&&(u.__html==f.__html||u.__html==t.innerHTML)||(t.innerHTML=u.__html),e.__k=[]):(f&&(t.textContent=""),(g=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&Yr.test(g))&&(a="http://www.w3.org/1999/xhtml"),Bt(d,lt(p)?p:[p],e,r,o,a,n,s,n?n[0]:r.__k&&se(r,0),i,l),n&&n.some(de)),i&&g!="textarea"||(c="value",g=="progress"&&$==null?t.removeAttribute(c):$==null||$===t[c]&&(g!="progress"||$)||Le(t,c,$,k[c],a),c="checked",m!=null&&m!=t[c]&&Le(t,c,m,k[c],a))}else k===h||i&&t.data==h||(t.data=h);return t}function ut(t,e,r,o){try{typeof t=="function"?e?e.__x=t(e)||1:o&&(o=o.__c||o.__e)&&(e=o.__x)&&(o.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){O.__e(a,r)}}function ht(t,e,r){var o,a,n,s;if(O.unmount&&O.unmount(t),!(o=t.ref)||o.current&&o.current!=t.__e||ut(o,null,e,t),o=t.__c){if(o.componentWillUnmount)try{o.componentWillUnmount()}catch(i){O.__e(i,e)}o.__P=o.__n=null}if(o=t.__k)for(s=0;s<o.length;s++)o[s]&&ht(o[s],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(o=t.__c)&&(o=o.__z)&&(a=je(o,n=[]))&&(o==t.__e&&n.some(de),de(a),de(o)),r||de(t.__e),t.__e=t.__c=t.__=null}function oo(t,e,r){return this.constructor(t,r)}function Fe(t,e){var r,o,a,n;O.__&&O.__(t,e),e.nodeType==9&&(e=e.documentElement),o=(r=t&&32&t.__u)?null:e.__k,e.__k=Se(Be,{children:[t]}),a=[],n=[],dt(e,e.__k,o||De,De,e.namespaceURI,o?null:e.firstChild?ct.call(e.childNodes):null,a,o?o.__e:e.firstChild,r,n),Gt(a,e.__k,n),e.__k.props.children=null}function Vt(t){function e(r){var o,a;return this.getChildContext||(o=new Set,(a={})[e.__c]=this,this.getChildContext=function(){return a},this.shouldComponentUpdate=function(n){this.props.value!=n.value&&o.forEach(function(s){s.__g|=4,st(s)})},this.sub=function(n){o.add(n);var s=n.componentWillUnmount;n.componentWillUnmount=function(){o.delete(n),s&&s.call(n)}}),r.children}return e.__c="__cC"+Ht++,e.__=t,e.Provider=(e.Consumer=function(r,o){return r.children(o)}).contextType=e,e}O={__e:function(t,e,r,o){for(var a,n,s;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((s=(n=a.constructor)&&n.getDerivedStateFromError)&&a.setState(n.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,o||{}),s=1),s&&8&a.__g)return void(a.__g|=2)}catch(i){t=i}}throw He=0,t}},Lt=0,Xr=function(t){return t!=null&&t.constructor===Oe},Ce.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=ue({},this.state)),typeof t=="function"&&(t=t(ue({},r),this.props)),t&&(ue(r,t),this.__v&&(e&&this.__k.push(e),st(this)))},Ce.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),st(this))},Ce.prototype.render=Be,ae=[],He=0,Nt=function(t,e){return t.__v.__b-e.__v.__b},Ne=Symbol(),jt=/(PointerCapture)$|Capture$/i,it=0,at={},Ht=0;var Jt=function(t,e,r,o){var a;e[0]=0;for(var n=1;n<e.length;n++){var s=e[n++],i=e[n]?(e[0]|=s?1:2,r[e[n++]]):e[++n];s===3?o[0]=i:s===4?o[1]=Object.assign(o[1]||{},i):s===5?(o[1]=o[1]||{})[e[++n]]=i:s===6?o[1][e[++n]]+=i+"":s?(a=t.apply(i,Jt(t,i,r,["",null])),o.push(a),i[0]?e[0]|=2:(e[n-2]=0,e[n]=a)):o.push(i)}return o},Kt=new Map;function Xt(t){var e=Kt.get(this);return e||(e=new Map,Kt.set(this,e)),(e=Jt(this,e.get(t)||(e.set(t,e=(function(r){for(var o,a,n=1,s="",i="",l=[0],d=function(f){n===1&&(f||(s=s.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?l.push(0,f,s):n===3&&(f||s)?(l.push(3,f,s),n=2):n===2&&s==="..."&&f?l.push(4,f,0):n===2&&s&&!f?l.push(5,0,!0,s):n>=5&&((s||!f&&n===5)&&(l.push(n,0,s,a),n=6),f&&(l.push(n,f,0,a),n=6)),s=""},c=0;c<r.length;c++){c&&(n===1&&d(),d(c));for(var u=0;u<r[c].length;u++)o=r[c][u],n===1?o==="<"?(d(),l=[l],n=3):s+=o:n===4?s==="--"&&o===">"?(n=1,s=""):s=o+s[0]:i?o===i?i="":s+=o:o==='"'||o==="'"?i=o:o===">"?(d(),n=1):n&&(o==="="?(n=5,a=s,s=""):o==="/"&&(n<5||r[c][u+1]===">")?(d(),n===3&&(l=l[0]),n=l,(l=l[0]).push(2,0,n),n=0):o===" "||o==="	"||o===`
`||o==="\r"?(d(),n=2):s+=o),n===3&&s==="!--"&&(n=4,l=l[0])}return d(),l})(t)),e),arguments,[])).length>1?e:e[0]}var _=Xt.bind(pt);var _e,j,ft,Yt,mt=Object.is,Pe=0,sr=[],xt=[],H=O,Zt=H.__b,Qt=H.__r,er=H.diffed,tr=H.__c,rr=H.unmount,or=H.__;function We(t,e){H.__h&&H.__h(j,t,Pe||e),Pe=0;var r=j.__H||(j.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function W(t){return Pe=1,no(pr,t)}function no(t,e,r){var o=We(_e++,2);if(o.t=t,!o.__c&&(o.__=[r?r(e):pr(void 0,e),function(n){var s=(o.__N||o.__)[0],i=o.t(s,n);mt(s,i)||(o.__N=[i,o.__[1]],o.__c.setState({}))}],o.__c=j,!j.__f)){j.__f=!0;var a=j.shouldComponentUpdate;j.shouldComponentUpdate=function(n,s,i){var l=this.__H;if(!l)return!0;var d=!1,c=this.props!=n;if(l.__.some(function(f){f.__N&&(d=!0,mt(f.__[0],f.__N[0])||(c=!0))}),a){var u=a.call(this,n,s,i);return d?u||c:u}return!d||c}}return o.__}function L(t,e){var r=We(_e++,3);!H.__s&&cr(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,j.__H.__h.push(r))}function z(t){return Pe=5,ee(function(){return{current:t}},[])}function ee(t,e){var r=We(_e++,7);return cr(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function ir(t,e){return Pe=8,ee(function(){return t},e)}function lr(t){var e=j.context[t.__c],r=We(_e++,9);return r.c=t,e?(r.__==null&&(r.__=!0,e.sub(j)),e.props.value):t.__}function ao(){var t;do{for(;t=xt.shift();)try{Ee(t)}catch(r){H.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=sr.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(Ee),e.__h.some(_t),e.__h=[]}catch(r){e.__h=[],H.__e(r,t.__v)}}}while(xt.length)}H.__b=function(t){j=null,Zt&&Zt(t)},H.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),or&&or(t,e)},H.__r=function(t){Qt&&Qt(t),_e=0;var e=(j=t.__c).__H;e&&(ft==j?j.__h=[]:(e.__h.some(Ee),e.__h.some(_t),_e=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),ft=j},H.diffed=function(t){er&&er(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&ar(sr.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),ft=j=null},H.__c=function(t,e){e.some(function(r){try{r.__h.some(Ee),r.__h=r.__h.filter(function(o){return!o.__||_t(o)})}catch(o){r.__h=[function(){throw o}]}}),tr&&tr(t,e)},H.unmount=function(t){rr&&rr(t);var e,r,o=t.__c;o&&o.__H&&(o.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,ar(xt.push(a))}else Ee(a)}catch(n){e=n}}),o.__H=void 0,e&&H.__e(e,o.__v))};var nr=typeof requestAnimationFrame=="function";function so(t){var e,r=function(){clearTimeout(o),nr&&cancelAnimationFrame(e),setTimeout(t)},o=setTimeout(r,35);nr&&(e=requestAnimationFrame(r))}function ar(t){t!=1&&Yt==H.requestAnimationFrame||((Yt=H.requestAnimationFrame)||so)(ao)}function Ee(t){var e=j,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),j=e}function _t(t){var e=j;t.__c=t.__(),j=e}function cr(t,e){return!t||t.length!=e.length||e.some(function(r,o){return!mt(r,t[o])})}function pr(t,e){return typeof e=="function"?e(t):e}var io={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function dr(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let o=io[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(o.length-1),n=Math.min(Math.floor(a),o.length-2);for(let s=0;s<3;s++){let[i,l]=[o[n][s],o[n+1][s]];e[3*r+s]=i+(l-i)*(a-n)}}return e}var gt={light:dr("light"),dark:dr("dark")};function $t(){let{jpThemeLight:t}=document.body.dataset;if(t!==void 0)return t==="true"?"light":"dark";for(let e of["light","dark"])if(document.body.classList.contains(`${e}-theme`))return e;return matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"}var Ge=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),ge=t=>gt[t];function Ve(t,e,r){let o=3*Ge(t,e),[a,n,s]=gt[r].subarray(o,o+3);return`rgb(${a} ${n} ${s})`}function ur(t,e,r){let o=3*Ge(t,e),[a,n,s]=gt[r].subarray(o,o+3);return .299*a+.587*n+.114*s>140?"#14161a":"#ffffff"}var bt=Vt(""),U=()=>{let t=lr(bt);return e=>t+e};var oe={left:[],right:[]},$e={factor:1,layers:{},heads:{}},fr={text:"",added:oe,answer:null,lambdas:$e,left:{layer:1,head:1},right:{layer:1,head:1},row:null},lo=({layer:t,head:e})=>`${t}.${e}`,hr=t=>t.split(",").filter(Boolean).map(Number);function Te(t){let e=new URLSearchParams;e.set("text",t.text);for(let s of["left","right"])e.set(s,lo(t[s])),t.added[s].length&&e.set(`${s}-added`,t.added[s].join(","));let{factor:r,layers:o,heads:a}=t.lambdas,n=[...r===1?[]:[["factor",r]],...Object.entries(o),...Object.entries(a)];return n.length&&e.set("lambda",n.map(([s,i])=>`${s}:${i}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function vt(t,e,r){let o=new URLSearchParams(t.slice(1));if(!o.has("text"))return e;let a={...e,text:o.get("text"),answer:null,row:null,added:{...oe}};for(let i of["left","right"]){let[l,d]=(o.get(i)??"").split(".").map(Number),c=r[i];c&&l>=1&&l<=c.layers&&d>=1&&d<=c.heads&&(a[i]={layer:Math.floor(l),head:Math.floor(d)});let u=hr(o.get(`${i}-added`)??"");u.every(Number.isInteger)&&(a.added[i]=u)}a.lambdas={factor:1,layers:{},heads:{}};for(let i of(o.get("lambda")??"").split(",")){let[l,d]=i.split(":"),c=Number(d);d===void 0||!Number.isFinite(c)||(l==="factor"?a.lambdas.factor=c:/^\d+$/.test(l)?a.lambdas.layers[l]=c:/^\d+\.\d+$/.test(l)&&(a.lambdas.heads[l]=c))}let n=hr(o.get("answer")??"");n.length===3&&n.every(Number.isInteger)&&(a.answer={query:n[0],begin:n[1],end:n[2]});let s=Number(o.get("row")??NaN);return Number.isInteger(s)&&s>=0&&(a.row=s),a}var be=({layers:t,heads:e},{layer:r,head:o})=>e[`${r}.${o}`]??t[r]??null,te=({factor:t,layers:e,heads:r})=>t!==1||Object.keys(e).length>0||Object.keys(r).length>0;var wt=new Float32Array(65536);for(let t=0;t<wt.length;t++){let e=t>>10&31,r=t&1023,o=e===0?r*2**-24:(1+r/1024)*2**(e-15);wt[t]=t>>15?-o:o}var ve=t=>t*(t+1)/2,Ke=(t,e,r)=>t.length>ve(e)?r*e:ve(r);function we(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375474)throw new Error("These are no attention maps.");let o=r.getUint32(4,!0),a=r.getUint32(8,!0),n=r.getUint32(12,!0),s=r.getUint32(16,!0)?ve(o):o*o,i=20,l=null;if(n===2){l=new Float32Array(o),a&&l.set(e.lam.subarray(0,a));for(let c=a;c<o;c++,i+=4)l[c]=r.getFloat32(i,!0)}let d=["first","second"].slice(0,n).map(c=>{let u=new Float32Array(s),f=Ke(u,o,a);a&&u.set(e[c].subarray(0,f));for(let p=f;p<u.length;p++,i+=2)u[p]=wt[r.getUint16(i,!0)];return u});return{length:o,lam:l,first:d[0],second:d[1]??null}}function yt(t,e){if(e===t.length)return t;let{lam:r,first:o,second:a}=t,n=ve(e);return{length:e,lam:r?.subarray(0,e)??null,first:o.subarray(0,n),second:a?.subarray(0,n)??null}}function Je(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let o=0,a=0;o<t.length;o++){let n=e??t.lam[o];for(let s=Ke(r,t.length,o+1);a<s;a++)r[a]=t.first[a]-n*t.second[a]}return r}var K=(t,e,r)=>t.subarray(Ke(t,e,r),Ke(t,e,r+1));function ze(t,...e){let r=0;for(let o of e){let a=o.length<=ve(t);for(let n=a?ve(Math.floor(t/4)):0;n<o.length;n++){let s=Math.abs(o[n]);s>r&&(r=s)}}return r||1}function Xe(t){let e=atob(t),r=new Uint8Array(e.length);for(let o=0;o<e.length;o++)r[o]=e.charCodeAt(o);return r.buffer}var mr={"\n":"⏎","	":"⇥","\r":"␍"},qe=t=>[...t].map(e=>{if(e in mr)return mr[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function D(t,e=14){let r=qe(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),o=[...r];return o.length>e?`${o.slice(0,e-1).join("")}…`:r||"∅"}var q=(t,e=0)=>`${(100*t).toFixed(e)} %`;function S(t,e=3){if(t==null||Number.isNaN(t))return"–";let r=Math.abs(t);return(r<10**-e&&t!==0?r<.001?t.toExponential(1):t.toPrecision(2):t.toFixed(e)).replace("-","−")}var Ye=({grid:t})=>t?"Class":"Next token",J=(t,e)=>`${t}.${e}`,kt=({heads:t,noise_heads:e},r)=>e?Math.ceil(r*e/t):null;function ye(t,e){let r=kt(t,e);if(r===null)return"";let o=t.heads/t.noise_heads;return`signal head ${e-(r-1)*o} of noise head ${r}`}function xr(t,e,r,o){let a=[];for(let s=1;s<r.length;s++){let i=K(e,r.length,s),l=0;for(let d=1;d<i.length;d++)Math.abs(i[d])>Math.abs(i[l])&&(l=d);a.push([Math.abs(i[l]),s,l,i[l]])}a.sort((s,i)=>i[0]-s[0]);let n=a.slice(0,3).map(([,s,i,l])=>{let[d,c]=[s,i].map(u=>`token ${u+1} “${D(o[u]??"")}”`);return`${d} gives ${S(l,2)} to ${c}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${n.join("; ")}.`}var co=450;function _r({models:t,runs:e,view:r,wanted:o,source:a,question:n,onChange:s,onRefusal:i}){let l=U(),[d,c]=W(!1),[u,f]=W(0),p=z(!1),x=Object.keys(t),$=(a.live||!te(r.lambdas))&&x.every(h=>e[h]&&e[h].tokens.length<t[h].most_tokens),m=async()=>{if(p.current)return;p.current=!0;let{text:h,added:g}=o;try{let b=await Promise.all(x.map(w=>a.next({...n(w),temperature:u,seed:0})));s(w=>{if(w.text!==h||w.added!==g)return{};let M={...w.added};return x.forEach((A,C)=>M[A]=[...M[A],b[C].token]),{added:M,row:null}})}catch(b){c(!1),i({side:"left",message:b.message})}finally{p.current=!1}};L(()=>{if(!d)return;if(!$){x.every(g=>e[g])&&c(!1);return}let h=setTimeout(m,co);return()=>clearTimeout(h)});let v=()=>{c(!1),s({added:oe,row:null})},k=h=>e[h]?.pieces.slice(e[h].pieces.length-r.added[h].length)??[];return _`
    <section class="card generation" aria-labelledby=${l("generation-title")}>
      <h2 id=${l("generation-title")}>Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!$} onClick=${m}>Step</button>
        <button type="button" disabled=${!$&&!d} aria-pressed=${d}
          onClick=${()=>c(!d)}>${d?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${v}>Begin again</button>
        ${a.live&&_`<label class="temperature">Temperature
          <select value=${u} onChange=${h=>f(Number(h.target.value))}>
            ${[0,.5,.8,1,1.5].map(h=>_`<option key=${h} value=${h}>${h||"0, most likely"}</option>`)}
          </select>
        </label>`}
      </div>
      ${x.map(h=>r.added[h].length>0&&_`
        <p class="written" key=${h}><span class="quiet">${t[h].label} </span>
          ${k(h).map((g,b,w)=>_`<span class=${b===w.length-1?"last":""}>${qe(g)}</span>${t[h].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom${x.length>1?"; both models write one at a time":""}.
        ${!a.live&&` This saved page holds what the ${x.length>1?"models write":"model writes"} with the learned λ.`}</p>
    </section>`}function Mt(t,e,r){let o=new Float32Array(r*r);for(let a=0;a<e;a++){let n=r*Math.floor(a*r/e);K(t,e,a).forEach((s,i)=>{let l=n+Math.floor(i*r/e);Math.abs(s)>Math.abs(o[l])&&(o[l]=s)})}return o}function gr(t,e,r,o){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),n=a.createImageData(r,r),s=ge(o);for(let i=0;i<e.length;i++){let l=3*e[i];n.data[4*i]=s[l],n.data[4*i+1]=s[l+1],n.data[4*i+2]=s[l+2],n.data[4*i+3]=255}a.putImageData(n,0,0)}function Ze(t,e,r,o,a,n=640){let s=Math.min(r,n),i=Mt(e,r,s);gr(t,Uint16Array.from(i,l=>Ge(l,o)),s,a)}function $r(t,e,r,o,a){let n=t.parentElement.getBoundingClientRect(),s=devicePixelRatio;[t.width,t.height]=[Math.ceil(n.width*s),Math.ceil(n.height*s)];let i=t.getContext("2d");i.imageSmoothingEnabled=!1;let l=document.createElement("canvas");e.forEach((d,c)=>{let u=d.getBoundingClientRect();At(l,r(c),o,a);let f=[u.left-n.left,u.top-n.top,u.width,u.height];i.drawImage(l,...f.map(p=>Math.round(p*s)))})}function At(t,e,r,o){gr(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,o)}function ie(){let t=z(null),[e,r]=W(0);return L(()=>{let o=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return o.observe(t.current),()=>o.disconnect()},[]),[t,e]}var br=168,he={left:44,right:10,top:26,bottom:18};function St(t,e,r,o,a,n=br){let s=K(t.first,t.length,o),i=K(e,t.length,o),l=t.second?r??t.lam[o]:0,d=t.second?K(t.second,t.length,o).map(b=>l*b):null,[c,u]=[0,1e-9];for(let b of[s,i,d??s])for(let w of b)w<c&&(c=w),w>u&&(u=w);let f={width:a-he.left-he.right,height:n-he.top-he.bottom},p=f.width/t.length,x=b=>he.left+(b+.5)*p,$=b=>he.top+(u-b)/(u-c)*f.height,m=b=>`M${Array.from(b,(w,M)=>`${x(M).toFixed(1)},${$(w).toFixed(1)}`).join("L")}`,v=Math.max(1,Math.min(14,p*.62)),k=Array.from(i,(b,w)=>[x(w)-v/2,$(Math.max(0,b)),v,Math.abs($(b)-$(0)),b]),h=Array.from(i,(b,w)=>[Math.abs(b),w]).sort((b,w)=>w[0]-b[0]).slice(0,4).filter(([b])=>b>.08*u).map(([,b])=>b),g=h.filter((b,w)=>h.slice(0,w).every(M=>Math.abs(x(b)-x(M))>56));return{first:m(s),taken:d&&m(d),bars:k,zero:$(0),x,y:$,low:c,high:u,labelled:g,left:i,end:a-he.right}}function vr({maps:t,net:e,lam:r,pieces:o,row:a,isPinned:n}){let[s,i]=ie(),l=i>120?St(t,e,r,a,i):null;return _`
    <figure class="curve" ref=${s}>
      <figcaption>
        <span>Row of token ${a+1} <b>${D(o[a]??"",24)}</b>${n?_` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&_`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${l&&_`
        <svg width=${i} height=${br} role="img" aria-label=${po(l,o,a)}>
          <line class="axis" x1="44" x2=${l.end} y1=${l.zero} y2=${l.zero} />
          <text class="tick" x="38" y=${l.y(l.high)} dy="0.32em" text-anchor="end">${S(l.high,2)}</text>
          <text class="tick" x="38" y=${l.zero} dy="0.32em" text-anchor="end">0</text>
          ${l.low<-.12*l.high&&_`<text class="tick" x="38" y=${l.y(l.low)} dy="0.32em" text-anchor="end">${S(l.low,2)}</text>`}
          ${l.bars.map(([d,c,u,f,p],x)=>_`<rect key=${x} class=${p<0?"net negative":"net"} x=${d} y=${p<0?l.zero:c} width=${u} height=${f} />`)}
          <path class="first" d=${l.first} />
          ${l.taken&&_`<path class="taken" d=${l.taken} />`}
          ${l.labelled.map(d=>_`<text key=${`l${d}`} class="peak" x=${Math.max(60,Math.min(l.end-20,l.x(d)))}
            y=${l.y(Math.max(l.left[d],0))-7} text-anchor="middle">${D(o[d]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var po=(t,e,r)=>`What token ${r+1} “${D(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(o=>`token ${o+1} “${D(e[o]??"")}” with ${S(t.left[o],2)}`).join(", ")}.`;var Ie={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Qe={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},uo="system-ui, -apple-system, 'Segoe UI', sans-serif",ho=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function B(t,e,r,{size:o=12,colour:a,anchor:n="start",weight:s=400,turn:i=0}){let l=i?` transform="rotate(${i} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${o}" fill="${a}" text-anchor="${n}" font-weight="${s}"${l}>${ho(r)}</text>`}function Ct(t,e,r,o){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${uo}">`,`<rect width="${t}" height="${e}" fill="${Ie[r][2]}"/>`,...o,"</svg>"].join(`
`)}var yr=(t,e,r,o)=>`<image x="${e}" y="${r}" width="${o}" height="${o}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function fo({models:t,view:e,panels:r,pieces:o,row:a,scale:n,lam:s,theme:i,left:l,net:d}){let[c,u]=Ie[i],f=300,p=52,x=28,$=40+r.length*(f+p)+(r.length-1)*x,m=[B(20,34,`${t.left.name}: layer ${e.left.layer}, head ${[e.left.head,ye(t.left,e.left.head)].filter(Boolean).join(", ")}${s==null?"":`, λ = ${S(s,2)}`}`,{size:17,colour:c,weight:600})];r.forEach((b,w)=>{let M=20+p+w*(f+p+x),A=66+p,C=document.createElement("canvas");Ze(C,b.weights,b.maps.length,n,i),m.push(B(M,A-p-8,b.name,{size:14,colour:c,weight:600}),yr(C,M,A,f));let I=f/b.maps.length;for(let E=0;E<b.maps.length;E+=Math.max(1,Math.ceil(11/I))){let N=D(o[b.side][E]??"",8),R=(E+.5)*I+3.5;m.push(B(M-4,A+R,N,{size:9.5,colour:u,anchor:"end"})),m.push(B(M+R,A-4,N,{size:9.5,colour:u,turn:-90}))}m.push(`<rect x="${M}" y="${A+Math.min(a,b.maps.length-1)*I}" width="${f}" height="${Math.max(1.5,I)}" fill="none" stroke="${c}"/>`)});let v=66+p+f+40,k=Math.min(a,l.length-1),h=St(l,d,l.second?s:null,k,$-40);m.push(B(20,v,`Row of token ${k+1} “${D(o.left[k]??"",24)}”`,{size:13,colour:c,weight:600})),m.push(`<g transform="translate(20 ${v+6})">`),m.push(...h.bars.map(([b,w,M,A,C])=>`<rect x="${b}" y="${C<0?h.zero:w}" width="${M}" height="${A}" fill="${c}" opacity="0.32"/>`)),m.push(`<path d="${h.first}" fill="none" stroke="${Qe[i][0]}" stroke-width="1.6"/>`),h.taken&&m.push(`<path d="${h.taken}" fill="none" stroke="${Qe[i][1]}" stroke-width="1.6"/>`),m.push(`<line x1="44" x2="${h.end}" y1="${h.zero}" y2="${h.zero}" stroke="${u}"/>`),m.push(...h.labelled.map(b=>B(h.x(b),h.y(Math.max(0,h.left[b]))-7,D(o.left[b]??"",12),{size:11,colour:c,anchor:"middle"}))),m.push(B(38,h.y(h.high)+4,S(h.high,2),{size:10,colour:u,anchor:"end"}),"</g>");let g=v+200;return m.push(...mo(36,g,n,i)),l.second&&m.push(B($-20,g+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:u,anchor:"end"})),Ct($,g+44,i,m)}function mo(t,e,r,o){let a=ge(o),n=[];for(let s=0;s<64;s++){let i=3*Math.round(510*s/63);n.push(`<rect x="${t+4*s}" y="${e}" width="4.2" height="10" fill="rgb(${a[i]},${a[i+1]},${a[i+2]})"/>`)}return[-1,0,1].forEach(s=>n.push(B(t+128*(1+s),e+24,S(s*r,2),{size:10,colour:Ie[o][1],anchor:"middle"}))),n}function xo(t,e,r,o){let[a,n]=Ie[o],s=t.heads>8?48:96,i=s+(t.heads>8?8:24),l=[B(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let d=1;d<=t.layers;d++){let c=56+(d-1)*i;l.push(B(34,c+s/2+4,String(d),{size:11,colour:n,anchor:"end"}));for(let u=1;u<=t.heads;u++){let f=44+(u-1)*(s+8),p=document.createElement("canvas");if(At(p,r((d-1)*t.heads+u-1),e.picture_size,o),l.push(yr(p,f,c,s)),s>60){let x=e.removed?.[d-1][u-1],$=x===void 0?J(d,u):`${J(d,u)}  −${q(x)}`;l.push(B(f,c+s+14,$,{size:10.5,colour:n}))}}}return Ct(64+t.heads*(s+8),64+t.layers*i+8,o,l)}function wr(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function Ot(t,e,r){let o=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){wr(o,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(o),await a.decode();let n=document.createElement("canvas");[n.width,n.height]=[2*a.width,2*a.height],n.getContext("2d").drawImage(a,0,0,n.width,n.height),URL.revokeObjectURL(a.src),n.toBlob(s=>wr(s,`${e}.png`),"image/png")}function _o(t,{next:e,divergence:r,loss:o,learned_loss:a},n){let[s,i]=Ie[n],l=e.slice(0,10),d=Math.max(...l.flatMap(g=>[g.probability,g.learned_probability]),1e-9),c=r>0,[u,f,p]=[140,260,24],x=u+f+(c?140:80),$=[B(20,34,`${t.name}: ${Ye(t).toLowerCase()}`,{size:17,colour:s,weight:600})];l.forEach((g,b)=>{let w=56+b*p,[M,A]=[g.probability,g.learned_probability].map(C=>f*C/d);$.push(B(u-8,w+14,D(g.piece),{colour:s,anchor:"end"}),`<rect x="${u}" y="${w+3}" width="${Math.max(1,M)}" height="${p-8}" fill="${Qe[n][0]}"/>`,B(u+f+58,w+14,q(g.probability,1),{colour:s,anchor:"end"})),c&&$.push(`<rect x="${u+A-1}" y="${w}" width="2" height="${p-2}" fill="${Qe[n][1]}"/>`,B(u+f+120,w+14,q(g.learned_probability,1),{colour:i,anchor:"end"}))});let m=56+l.length*p+22,v=c?`${S(o)} (${S(a)})`:S(o),k=t.grid?"":`loss on the text ${v}`,h=c?`KL ${S(r)} nats${k&&`, ${k}`}; orange, grey: learned λ`:k;return $.push(B(20,m,h,{size:11,colour:i})),Ct(x,m+18,n,$)}var kr=(t,e)=>Ot(fo(t),`head-${J(t.view.left.layer,t.view.left.head)}`,e),Mr=(t,e,r,o)=>Ot(_o(t,e,r),`next-${t.name}`,o),Ar=(t,e,r,o,a)=>Ot(xo(t,e,r,o),`heads-${t.name}`,a);var ke=({disabled:t,onSave:e})=>["PNG","SVG"].map(r=>_`<button type="button" key=${r} class="link" disabled=${t} onClick=${()=>e(r.toLowerCase())}>${r}</button>`);var go={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function Sr({side:t,model:e,heads:r,isBusy:o,chosen:a,theme:n,onChoose:s}){let i=U(),l=z(null),d=z(null),[c,u]=ie(),f=ee(()=>{if(!r)return null;let h=typeof r.pictures=="string"?new Int8Array(Xe(r.pictures)):r.pictures,g=r.picture_size**2;return b=>h.subarray(b*g,(b+1)*g)},[r?.pictures]);L(()=>{f&&$r(d.current,c.current.querySelectorAll(".picture"),f,r.picture_size,n)},[r,n,u]);let p=h=>{let g=go[h.key];if(!g)return;h.preventDefault();let b=Math.min(e.layers,Math.max(1,a.layer+g[0])),w=Math.min(e.heads,Math.max(1,a.head+g[1]));s({layer:b,head:w}),l.current.querySelector(`[data-head="${J(b,w)}"]`)?.focus()},x=h=>Array.from({length:h},(g,b)=>b+1),$=(h,g)=>r?.removed?.[h-1][g-1],m=(h,g)=>r?.on_answer?.[h-1][g-1],v=(h,g)=>[`Head ${J(h,g)}`,ye(e,g),$(h,g)!==void 0&&`the subtraction removes ${q($(h,g))} of A1`,m(h,g)!==void 0&&`${q(m(h,g))} on the answer`].filter(Boolean).join(", "),k=e.heads>8;return _`
    <section class=${`card grid-card ${k?"dense":""}`} aria-labelledby=${i(`grid-${t}`)}>
      <div class="card-head">
        <h2 id=${i(`grid-${t}`)}>${e.label}, all heads</h2>
        <span class="buttons">
          <${ke} disabled=${!r} onSave=${h=>Ar(e,r,f,n,h)} />
        </span>
      </div>
      <div class="scroll"><div class="sheet" ref=${c}>
        <canvas ref=${d} width="8" height="8" aria-hidden="true"></canvas>
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} aria-busy=${o} ref=${l} onKeyDown=${p}
          style=${`--heads:${e.heads};--thumb:${k?44:e.heads>4?92:124}px`}>
          ${x(e.layers).map(h=>_`
            <div class="grid-row" role="row" key=${h}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${h}</span>
              ${x(e.heads).map(g=>{let b=a.layer===h&&a.head===g;return _`
                  <button type="button" role="gridcell" key=${g} class=${`head ${b?"chosen":""}`}
                    aria-selected=${b} tabindex=${b?0:-1} data-head=${J(h,g)}
                    aria-label=${v(h,g)} title=${v(h,g)} onClick=${()=>s({layer:h,head:g})}>
                    <span class="picture"></span>
                    ${!k&&_`<span class="numbers" aria-hidden="true">
                      ${$(h,g)!==void 0&&_`<span>${$(h,g)>.005?"−":""}${q($(h,g))}</span>`}
                      ${m(h,g)!==void 0&&_`<span class="on-answer">◎ ${q(m(h,g))}</span>`}
                    </span>`}
                    ${k&&$(h,g)!==void 0&&_`<span class="gauge" aria-hidden="true" style=${{width:`${100*$(h,g)}%`}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div></div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(k?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${r?.on_answer&&!k?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var $o=46,bo=11;function Cr({panel:t,pieces:e,size:r,hasStrip:o,scale:a,theme:n,row:s,answer:i,added:l,onHover:d,onPin:c}){let u=z(null),{maps:f,weights:p,name:x}=t;L(()=>{Ze(u.current,p,f.length,a,n)},[p,f.length,a,n]);let $=o?$o:0,m=r-$,v=m/f.length,k=Math.max(1,Math.ceil(bo/v)),h=[];if($)for(let M=0;M<f.length;M+=k)h.push(M);let g=M=>{let A=u.current.getBoundingClientRect(),C=Math.floor((M.clientY-A.top)/A.height*f.length);return Math.max(0,Math.min(f.length-1,C))},b=M=>$+(M+.5)*v,w=i&&i.end<=f.length;return _`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${x}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${u} width="8" height="8" role="img" aria-label=${xr(x,p,f,e)}
          data-map=${t.key} style=${{left:`${$}px`,top:`${$}px`,width:`${m}px`,height:`${m}px`}}
          onPointerMove=${M=>d(g(M))} onPointerLeave=${()=>d(null)}
          onClick=${M=>c(g(M))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${h.map(M=>_`
            <text key=${`r${M}`} x=${$-4} y=${b(M)} class=${M===s?"on":""} dy="0.32em"
              text-anchor="end">${D(e[M]??"",7)}</text>
            <text key=${`c${M}`} transform=${`translate(${b(M)} ${$-4}) rotate(-90)`} dy="0.32em">${D(e[M]??"",7)}</text>`)}
          ${w&&_`<rect class="answer" x=${$+i.begin*v} y=${$}
            width=${Math.max(1.5,(i.end-i.begin)*v)} height=${m} />`}
          ${l>0&&_`<line class="added" x1=${$} x2=${r} y1=${$+(f.length-l)*v}
            y2=${$+(f.length-l)*v} />`}
          <rect class="row" x=${$} y=${$+s*v} width=${m} height=${Math.max(2,v)} />
        </svg>
      </div>
    </figure>`}function Or({examples:t,models:e},{text:r}){let{grid:o,most_tokens:a}=e.left;if(!o)return null;let[n,s]=o,i=t.findIndex(({title:l})=>l===r);return{picture:t[i]?.picture,first:i*a,rows:n,columns:s,others:a-n*s}}var Et=({image:{picture:t,rows:e,columns:r},children:o})=>_`
  <div class="patches" style=${{backgroundImage:t?`url(${t})`:"none",gridTemplateColumns:`repeat(${r}, 1fr)`,aspectRatio:`${r} / ${e}`}}>
    ${o}
  </div>`;function Er({models:t,runs:e,image:r,row:o,theme:a}){let n=i=>!i.waitsForHeads&&i.tokens[0]===r.first,s=Object.keys(t).filter(i=>e[i]?.heads?.rollout);return _`
    <div class="rollouts">
      ${s.map(i=>{let{rollout:l}=e[i].heads,d=l[Math.min(o,l.length-1)].slice(-r.rows*r.columns),c=Math.max(...d,1e-9);return _`
          <figure key=${i} data-rollout=${i} style=${{visibility:n(e[i])?"visible":"hidden"}}>
            <figcaption>${t[i].label}: what reaches token <b>${o+1}</b> through all layers (attention rollout)</figcaption>
            <${Et} image=${r}>
              ${d.map((u,f)=>_`<span key=${f} class="token" style=${{background:Ve(u,c,a)}} title=${S(u)}></span>`)}
            <//>
          </figure>`})}
    </div>`}function Pr({data:t,view:e,onChange:r}){let o=U();return _`
    <section class="card images" aria-labelledby=${o("images-title")}>
      <h2 id=${o("images-title")}>Image</h2>
      <p class="examples">
        ${t.examples.map(({title:a,picture:n})=>_`<button type="button" class="thumb" key=${a} aria-pressed=${a===e.text}
            onClick=${()=>r({text:a,row:null})}><img src=${n} alt=${a} /></button>`)}
      </p>
    </section>`}function Tr({scale:t,theme:e}){let r=z(null);L(()=>{let a=r.current.getContext("2d"),n=a.createImageData(511,1),s=ge(e);for(let i=0;i<511;i++){for(let l=0;l<3;l++)n.data[4*i+l]=s[3*i+l];n.data[4*i+3]=255}a.putImageData(n,0,0)},[e]);let o=[-1,-.25,0,.25,1];return _`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${S(t,2)} over the background at 0 to blue at ${S(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${o.map(a=>_`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${Math.abs(a)===1?`${a<0?"≤ ":"≥ "}${S(a*t,2)}`:S(a*t,2)}</span>`)}
      </div>
    </div>`}function zr({pieces:t,values:e,scale:r,theme:o,row:a,pinned:n,answer:s,added:i,between:l,image:d,onHover:c,onPin:u,onAnswer:f}){let p=U(),x=z(null),$=z(!1),m=()=>x.current.querySelector(".on")?.scrollIntoView({block:"nearest"});L(()=>{$.current&&m(),$.current=!1},[a]);let v=s!==null&&n>=s.begin&&n<s.end,k=w=>{let A={ArrowLeft:-1,ArrowRight:1,ArrowUp:-10,ArrowDown:10,Home:-t.length,End:t.length}[w.key];if(w.key==="Escape"&&n!==null)u(n);else if(A!==void 0){w.preventDefault();let C=Math.max(0,Math.min(t.length-1,a+A));$.current=!0,c(null),C!==n&&u(C)}},h=w=>{let M=w.target.closest("[data-token]");return M?Number(M.dataset.token):null},g=w=>["token",w===a&&"on",w===n&&"pinned",s&&w>=s.begin&&w<s.end&&"answer",w>=t.length-i&&"new"].filter(Boolean).join(" "),b=t.map((w,M)=>{let A=M<e.length?e[M]:0,C=M<e.length?{background:Ve(A,r,o),color:ur(A,r,o)}:{},I=d&&M>=d.others;return _`<span key=${M} id=${p(`token-${M}`)} class=${g(M)} style=${C} role="option"
      data-token=${M} aria-selected=${M===a} aria-label=${I?`patch ${w}`:null}
      title=${`${I?`patch ${w}`:`token ${M+1}`}: ${S(A)}`}>${I?"":qe(w)}</span>${w.includes(`
`)?_`<br />`:""}`});return _`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${n!==null?", Esc lets go":""}.</span>
      ${f&&n!==null&&n<t.length-1&&_`<button type="button" class="link"
          onClick=${()=>f(v?null:{query:t.length-1,begin:n,end:n+1})}>${v?"No longer the answer":"Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${l||d?"spaced":""}`} role="listbox" tabindex="0" onFocus=${m} aria-label="Tokens of the text" ref=${x}
      aria-activedescendant=${p(`token-${a}`)} onKeyDown=${k} onPointerOver=${w=>c(h(w))}
      onPointerLeave=${()=>c(null)} onClick=${w=>h(w)!==null&&u(h(w))}>
      ${d?_`${b.slice(0,d.others)}<${Et} image=${d}>${b.slice(d.others)}<//>`:b}
    </div>`}function vo({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let o=t/e,a=Math.ceil(r/o);return`shares key/value head ${a} with heads ${(a-1)*o+1}–${a*o}`.replace(/heads (\d+)–\1$/,"head $1")}function qr({models:t,runs:e,maps:r,view:o,image:a,theme:n,row:s,hovered:i,shared:l,onHover:d,onChange:c,live:u,hasAddress:f}){let p=U(),[x,$]=ie(),[m,v]=[r.left,r.right],k=m&&m.head.layer===o.left.layer&&m.head.head===o.left.head,h=t.left.subtracts?be(o.lambdas,o.left):null,g=t.left.lambda_per_token?void 0:e.left?.learned_lambdas?.[o.left.layer-1][o.left.head-1],b=k?h??(g===void 0?null:o.lambdas.factor*g):null,w=ee(()=>m?Je(m,b):null,[m,b]),M=ee(()=>m?Math.max(ze(m.length,m.first,m.second??[],w),v?ze(v.length,v.first):0):1,[m,v,w]),A={left:e.left?.pieces??[],right:e.right?.pieces??[]},C=m?b??m.lam?.[Math.min(s,m.length-1)]:null,I=J(o.left.layer,o.left.head),E=[];if(m?.second){let T=kt(t.left,m.head.head),Ae=T===null?"A₂":`A₂ of noise head ${T}`;E.push({key:"first",name:"A₁",side:"left",maps:m,weights:m.first}),E.push({key:"second",name:Ae,side:"left",maps:m,weights:m.second}),E.push({key:"net",name:"A₁ − λA₂",side:"left",maps:m,weights:w,strong:!0})}if(v){let T=`${t.right.label} ${J(v.head.layer,v.head.head)}`;E.push({key:"right",name:T,side:"right",maps:v,weights:v.first})}let N=$>=(E.length===3?540:700)?E.length:Math.min(2,E.length),R=$>=860?20:12,me=Math.max(0,Math.floor(($-R*(N-1))/Math.max(1,N))),le=T=>c(Ae=>({row:Ae.row===T?null:T})),xe=[ye(t.left,o.left.head),vo(t.left,o.left)];t.left.lambda_per_token&&xe.push("a λ for every token");let ce={models:t,view:o,panels:E,pieces:A,row:s,scale:M,lam:C,theme:n,left:m,net:w,right:v};return _`
    <section class="card head-view" aria-labelledby=${p("head-title")}>
      <div class="card-head">
        <h2 id=${p("head-title")}>
          Layer ${o.left.layer}, head ${o.left.head}
          ${C!=null&&_` <span class="quiet">λ = ${S(C,2)}</span>`}
          ${xe.filter(Boolean).map(T=>_` <span class="quiet note">${T}</span>`)}
        </h2>
        <span class="buttons">
          ${f&&_`<button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href.split("#")[0]+Te(o))}>Copy link</button>`}
          <${ke} disabled=${!m} onSave=${T=>kr(ce,T)} />
        </span>
      </div>
      <div ref=${x} class="panels" style=${{gridTemplateColumns:`repeat(${N||1}, 1fr)`,gap:`${R}px`}}>
        ${me>0&&E.map(T=>_`
          <${Cr} key=${T.key} panel=${T} pieces=${A[T.side]} size=${me} hasStrip=${me>=200||N>2} scale=${M} theme=${n}
            row=${Math.min(s,T.maps.length-1)} answer=${T.side==="left"||l?o.answer:null}
            added=${o.added[T.side].length} head=${T.side==="left"?I:null}
            onHover=${d} onPin=${le} />`)}
      </div>
      <${Tr} scale=${M} theme=${n} />
      ${m&&_`
        <${zr} pieces=${A.left.slice(0,m.length)} values=${K(w,m.length,Math.min(s,m.length-1))} scale=${M} theme=${n}
          between=${t.left.between} row=${Math.min(s,m.length-1)} pinned=${o.row} answer=${o.answer} added=${o.added.left.length}
          image=${a} onHover=${d} onPin=${le} onAnswer=${u&&!a?T=>c({answer:T}):null} />
        ${a&&_`<${Er} models=${t} runs=${e} image=${a} row=${s} theme=${n} />`}
        <${vr} maps=${m} net=${w} lam=${b} pieces=${A.left} row=${Math.min(s,m.length-1)}
          isPinned=${o.row!==null&&i===null} />`}
      ${!u&&te(o.lambdas)&&_`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the live explorer computes them anew.</p>`}
    </section>`}var wo=-.5,yo=1.5,X=[-.5,2],ko=t=>t.reduce((e,r)=>e+r,0)/t.length;function Pt({id:t,name:e,value:r,learned:o,isSet:a,inherited:n,main:s,onInput:i,onLearned:l}){let[d,c]=s?X:[Math.min(wo,Math.floor(10*o)/10),Math.max(yo,Math.ceil(10*o)/10)],u=s?"×":"=",f=x=>(x-d)/(c-d),p=Math.max(d,Math.min(c,r));return _`
    <div class=${`slider ${s?"main":""} ${a?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}</label>
        <output for=${t}>λ ${u} ${S(r,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${f(0)};--learned-part:${f(o)}`}>
        <input id=${t} type="range" min=${d} max=${c} step="0.01" value=${p}
          aria-valuetext=${`λ ${u} ${S(r,2)}; learned ${S(o,2)}`}
          onInput=${x=>i(Number(x.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${a&&s?"of the learned λ of every head":a?`learned ${S(o,2)}`:n?"as set above":"as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!a} onClick=${l}
            aria-label=${`${e}: back to ${n?"what is set above":"the learned λ"}`}>
            ${n?"As above":"Learned"}
          </button>
          <button type="button" onClick=${()=>i(0)} aria-label=${`${e}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`}var Ir=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function Rr({model:t,run:e,place:r,lambdas:o,onChange:a}){let n=U();if(!e?.learned_lambdas)return _`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let s=e.learned_lambdas,{layer:i,head:l}=r,d=`${i}.${l}`,{factor:c,layers:u,heads:f}=o,p=ko(s[i-1]),x=[...Object.values(u),...Object.values(f)],$=[...x,...s.flat().map(m=>c*m)].some(m=>m<0);return _`
    <section class="card lambda" aria-labelledby=${n("lambda-title")}>
      <div class="card-head">
        <h2 id=${n("lambda-title")}>Move λ</h2>
        <button type="button" class="link" disabled=${!te(o)}
          onClick=${()=>a($e)}>All as learned</button>
      </div>
      <${Pt} id=${n("lambda-factor")} main name="All heads" value=${c} learned=${1} isSet=${c!==1}
        onInput=${m=>a({factor:m,layers:{},heads:{}})}
        onLearned=${()=>a({...o,factor:1})} />
    </section>
    <div class="finer">
      <details open=${x.length>0||void 0}>
        <summary>One layer, one head</summary>
        <${Pt} id=${n("lambda-layer")} name=${`Layer ${i}`} value=${u[i]??c*p}
          learned=${p} isSet=${i in u} inherited=${c!==1}
          onInput=${m=>a({...o,layers:{...u,[i]:m}})}
          onLearned=${()=>a({...o,layers:Ir(u,i)})} />
        <${Pt} id=${n("lambda-head")} name=${`Head ${d}`} value=${be(o,r)??c*s[i-1][l-1]}
          learned=${s[i-1][l-1]} isSet=${d in f} inherited=${c!==1||i in u}
          onInput=${m=>a({...o,heads:{...f,[d]:m}})}
          onLearned=${()=>a({...o,heads:Ir(f,d)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${$?" A λ below 0 adds the second map instead of taking it away.":""}
        ${t.lambda_per_token?" The model computes a λ for every token; the slider of a layer or of a head gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ ${c===1?"=":"×"} ${S(e.recorded_at,2)}.`:""}
      </p>
    </div>`}function fe({name:t,value:e,before:r,title:o}){return _`
    <tr title=${o}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function Lr({run:t,right:e,models:r,theme:o}){let a=U(),{grid:n}=r.left,s=Ye(r.left);if(!t)return _`<section class="card predictions" aria-busy="true"><h2>${s}</h2></section>`;if(t.is_recorded===!1)return _`<section class="card predictions">
      <h2>${s}</h2>
      <p class="quiet">What the model predicts with these λ was not recorded in this saved page; <code>${n?"explore_images":"diff-transformer explore"}</code> computes it.</p>
    </section>`;let i=t.next.slice(0,10),l=Math.max(...t.next.flatMap(u=>[u.probability,u.learned_probability]),1e-9),d=u=>({width:`${100*u/l}%`}),c=t.divergence>0;return _`
    <section class="card predictions" aria-labelledby=${a("next-title")}>
      <div class="card-head">
        <h2 id=${a("next-title")}>${s}</h2>
        <span class="buttons"><${ke} onSave=${u=>Mr(r.left,t,o,u)} /></span>
      </div>
      <table class="bars">
        <caption class="hidden">The most likely, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>name</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${i.map(u=>_`
            <tr key=${u.token}>
              <th scope="row">${D(u.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${d(u.probability)}></span>
                <span class="was" style=${{left:`${100*u.learned_probability/l}%`}}></span>
              </td>
              <td class="value">${q(u.probability,1)}</td>
              <td class="value was-value">${c?q(u.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${c&&_`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${fe} name="KL to the learned λ" value=${`${S(t.divergence)} nats`}
            title="KL(learned ‖ now) of what is predicted" />
          ${!n&&_`<${fe} name="Loss on the text" value=${S(t.loss)} before=${S(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />`}
          ${t.answer_probability!==void 0&&_`<${fe} name="Probability of the answer"
            value=${q(t.answer_probability,1)} before=${q(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&_`<${fe} name="Attention on the answer" value=${q(t.answer_share,1)}
            before=${q(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&_`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          ${!n&&_`<${fe} name="Loss on the text" value=${S(e.loss)} />`}
          ${e.answer_probability!==void 0&&_`<${fe} name="Probability of the answer" value=${q(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&_`<${fe} name="Attention on the answer" value=${q(e.answer_share,1)} />`}
          <tr><th scope="row">${s}</th><td colspan="2">${e.next.slice(0,2).map(u=>`“${D(u.piece)}” ${q(u.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var Me=class extends Error{},et=class{live=!0;hasAddress=!0;constructor(e="api/"){this.address=e}async#e(e,r){let o;try{o=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new Me("The explorer does not answer; its command may have ended.")}if(!o.ok){let a=await o.json().catch(()=>({}));throw new Me(a.error??`The explorer answered ${o.status}.`)}return o}run=async e=>(await this.#e("run",e)).json();map=async(e,r)=>we(await(await this.#e("map",e)).arrayBuffer(),r);next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json();strip=async e=>(await this.#e("strip",e)).json()},Re=class{#e=!1;#t=null;answered=Promise.resolve();ask(e){if(this.#e){this.#t=e;return}this.#e=!0,this.answered=e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};var tt=132,[Tt,Mo]=[22,20],zt=20,Nr=.05;function Ao(t,e,r){let o=t.findIndex(i=>i>=r);if(o<0||o===0&&t[0]!==r)return null;let[a,n]=[o,Math.max(0,o-1)].map(i=>e[t[i]]?.value);if(a===void 0||n===void 0)return null;let s=o?(r-t[o-1])/(t[o]-t[o-1]):1;return n+s*(a-n)}function So(t,e,r){let o=(n,s=0)=>q(n,s).replace(" "," ");return t?`${e.value<=t.floor+Nr&&r.value>t.floor+Nr?`the model guesses: ${o(e.value)} of its`:`${o(e.value)} of the model’s`} answers are right, ${o(r.value)} with the learned λ (${t.sequences} questions). A guess among the values in the text gives ${o(t.floor)}.`:`the probability of “${D(e.piece)}” goes from ${o(r.value,1)} to ${o(e.value,1)}.`}function jr({factors:t,task:e,points:r,lambdas:o}){let a=U(),[n,s]=ie(),i=t.filter(h=>h in r),{0:l,1:d}=r,c=r[i[0]]?.piece,u=e?1:Math.max(1e-9,...i.map(h=>r[h].value)),f=h=>zt/2+(s-zt)*(h-X[0])/(X[1]-X[0]),p=h=>Tt+(tt-Tt-Mo)*(1-h/u),{factor:x,layers:$,heads:m}=o,v=Object.keys($).length+Object.keys(m).length===0,k=Ao(t,r,x);return _`
    <section class="strip" ref=${n} aria-labelledby=${a("strip-title")} hidden=${!i.length}>
      <h2 id=${a("strip-title")}>${e?"Right answers":_`Probability of <b>${D(c??"")}</b>`} by λ, in %</h2>
      ${i.length>0&&s>zt&&_`
        <svg width=${s} height=${tt} role="img" aria-label=${i.map(h=>`λ × ${h}: ${q(r[h].value,e?0:1)}`).join(", ")}>
          ${e&&_`
            <line class="floor" x1=${f(X[0])} x2=${f(X[1])} y1=${p(e.floor)} y2=${p(e.floor)} />
            <text x=${f(X[0])} y=${p(e.floor)-5}>a guess</text>`}
          <text x=${f(X[0])} y=${tt-5}>λ ×</text>
          <line class="axis" x1=${f(X[0])} x2=${f(X[1])} y1=${p(0)} y2=${p(0)} />
          ${v&&_`<line class="now" x1=${f(x)} x2=${f(x)} y1=${Tt-6} y2=${p(0)} />`}
          <path d=${`M${i.map(h=>`${f(h).toFixed(1)},${p(r[h].value).toFixed(1)}`).join("L")}`} />
          ${i.map(h=>_`
            <circle key=${`c${h}`} cx=${f(h)} cy=${p(r[h].value)} r="2.5" />
            <text key=${`v${h}`} x=${f(h)} y=${p(r[h].value)-8} text-anchor="middle">${q(r[h].value,e?0:1).replace(" %","")}</text>
            <text key=${`f${h}`} x=${f(h)} y=${tt-5} text-anchor="middle">${S(h,2).replace(/\.?0+$/,"")||"0"}</text>`)}
          ${v&&k!==null&&_`<circle class="now" cx=${f(x)} cy=${p(k)} r="5" />`}
        </svg>`}
      ${l&&d&&_`<p>Switch the second map off (λ × 0) and ${So(e,l,d)}</p>`}
      <p class="quiet">The learned λ of all heads are multiplied by the same factor.</p>
    </section>`}function Hr({data:t,source:e,view:r,onChange:o,onRefusal:a}){let n=U(),[s,i]=W(r.text),l=z(0),d=z(null),c=z(r.text);L(()=>{r.text!==c.current&&i(r.text),c.current=r.text},[r.text]);let u=(x,$=null)=>{clearTimeout(d.current),o({text:x,answer:$,added:oe,row:null})},f=x=>{i(x),clearTimeout(d.current),d.current=setTimeout(()=>{c.current=x,u(x)},350)},p=async()=>{try{l.current+=1;let x=await e.example({seed:l.current});u(x.text,x.answer)}catch(x){a({side:"left",message:x.message})}};return _`
    <section class="card text" aria-labelledby=${n("text-title")}>
      <div class="card-head">
        <h2 id=${n("text-title")}><label for=${n("text")}>Text</label></h2>
        ${e.live&&t.draws_examples&&_`<button type="button" class="link" onClick=${p}>Another question</button>`}
      </div>
      <textarea id=${n("text")} rows="4" spellcheck="false" readonly=${!e.live} value=${s}
        onInput=${x=>f(x.target.value)}></textarea>
      ${e.live&&t.examples.length>0&&_`<p class="examples">
        ${t.examples.map(x=>_`<button type="button" class="chip" key=${x.title}
            onClick=${()=>u(x.text,x.answer)}>${x.title}</button>`)}
      </p>`}
      ${!e.live&&_`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var Dr={few:48,many:32},Co=300;function Oo(){let[t,e]=W($t);return L(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),o=()=>e($t());return r.addEventListener("change",o),()=>r.removeEventListener("change",o)},[]),t}function Eo(t,e){let r=t.examples[0],o={...fr,text:r?.text??"",answer:r?.answer??null};return t.opening&&(o.left=t.opening,t.models.right&&!o.answer&&(o.right=Ur(t.opening,t.models.right))),vt(e,o,t.models)}var Ur=({layer:t,head:e},{layers:r,heads:o})=>({layer:Math.min(t,r),head:Math.min(e,o)});function Po({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let o={layer:1,head:1,number:-1};return r.forEach((a,n)=>a.forEach((s,i)=>{s>o.number&&(o={layer:n+1,head:i+1,number:s})})),{layer:o.layer,head:o.head}}function Br({data:t,source:e,root:r}){let{models:o}=t,a=Object.keys(o),n=Oo(),s=e.hasAddress?location.hash:"",[i,l]=W(()=>Eo(t,s)),d=e.shown?.(i)??i,[c,u]=W({}),[f,p]=W({}),[x,$]=W({}),[m,v]=W(null),[k,h]=W(null),g=ee(()=>Object.fromEntries(["left","right"].map(y=>[y,{run:new Re,map:new Re}])),[]),b=z({}),w=z(!1),M=z(!1);M.current=!d.text.trim();let A=z(s.length>1?{left:!0,right:!0}:{left:!!t.opening}),C=ir(y=>l(P=>({...P,...y instanceof Function?y(P):y})),[]),I=y=>{let P={side:y,text:d.text};return d.added[y].length&&(P.append=d.added[y]),y==="left"&&te(d.lambdas)&&(P.lambdas=d.lambdas),P},E=y=>d.answer&&(y==="left"||t.shared_vocabulary)?{answer:d.answer}:{};for(let y of a){let P=I(y),ne={...P,...E(y)};L(()=>{if(!d.text.trim()){y==="left"&&v({side:y,message:"The text is empty; write something."});return}let Y=o[y].layers*o[y].heads>64?Dr.many:Dr.few,Z=V=>u(F=>({...F,[y]:F[y]&&{...F[y],waitsForHeads:V}}));Z(!0),g[y].run.ask(async()=>{try{if(y==="right"&&await g.left.run.answered,y==="right"&&w.current){Z(!1);return}let V=await e.run(ne);if(y==="left"&&(w.current=!1),v(Q=>Q?.side===y&&!M.current?null:Q),u(Q=>({...Q,[y]:{heads:Q[y]?.heads,...V,waitsForHeads:!V.heads}})),g[y].run.waits||V.heads)return;let F=await e.run({...ne,picture:Y});u(Q=>({...Q,[y]:F}));let re=A.current[y]?null:Po(F.heads);if(re&&(A.current[y]=!0),!re)return;C({[y]:re}),y==="left"&&o.right&&!d.answer&&!A.current.right&&C({right:Ur(re,o.right)})}catch(V){Z(!1),y==="left"&&(w.current=!0),y==="right"&&(u(({right:F,...re})=>re),p(({right:F,...re})=>re),b.current.right=void 0),v({side:y,message:V.message})}})},[JSON.stringify(ne)]);let G=d[y];L(()=>{d.text.trim()&&g[y].map.ask(async()=>{try{if(y==="right"&&await g.left.run.answered,y==="right"&&w.current)return;let{append:Y,...Z}=P,V=JSON.stringify([Z,G]),F=b.current[y],Q=F?.key===V&&F.append.every((pe,Jr)=>Y?.[Jr]===pe)&&Y?.length>F.append.length?F.maps.length:0,qt={...P,layer:G.layer,head:G.head},It=await e.map(Q?{...qt,first_row:Q}:qt,F?.maps);b.current[y]={key:V,append:Y??[],maps:It},p(pe=>({...pe,[y]:{...It,head:G}})),v(pe=>pe?.side===y&&pe.ofMap?null:pe)}catch(Y){v(Z=>Z??{side:y,message:Y.message,ofMap:!0})}})},[JSON.stringify([P,G])])}let{factors:N,task:R}=t.strip,me={text:d.text,...E("left")};L(()=>{let y=!1;return(async()=>{for(let P of R||d.text.trim()?N:[]){await g.left.run.answered;let ne=y?null:await e.strip({...me,factor:P});if(y||($(G=>P===N[0]?{}:G),ne.value===null))return;$(G=>({...G,[P]:ne}))}})().catch(()=>{}),()=>y=!0},[R?null:JSON.stringify(me)]);let le=c.left,xe=le?.tokens.length??0,ce=Or(t,d),T=ce?0:d.added.left.length?xe-1:d.answer?.query??xe-1,Ae=Math.max(0,Math.min(k??d.row??T,xe-1));L(()=>{r.dataset.theme=n;let y=!o.right||f.right||m?.side==="right";r.dataset.ready=String(!!(le?.heads&&f.left&&y))}),L(()=>{if(!e.hasAddress)return;let y=setTimeout(()=>history.replaceState(null,"",Te(d)),Co);return()=>clearTimeout(y)},[Te(d)]),L(()=>{if(!e.hasAddress)return;let y=()=>l(P=>vt(location.hash,P,o));return addEventListener("hashchange",y),()=>removeEventListener("hashchange",y)},[]);let Vr=a.map(y=>{let{heads:P,waitsForHeads:ne}=c[y]??{},{layer:G,head:Y}=d[y],Z=m?.side!==y&&(!P||!!ne);return ee(()=>{let V=F=>{A.current[y]=!0,C({[y]:F})};return _`<${Sr} key=${y} side=${y} model=${o[y]} heads=${P} isBusy=${Z} chosen=${{layer:G,head:Y}}
        theme=${n} onChoose=${V} />`},[P,Z,G,Y,n])}),Kr=y=>C({lambdas:y});return _`
    <header class="top">
      ${t.pairs?.length>1&&_`<nav class="pairs" aria-label="Models">
        <span class="quiet">Models</span>
        ${t.pairs.map(({name:y,address:P})=>_`<a key=${y} href=${P}
            aria-current=${location.pathname===P?"page":null}>${y}</a>`)}
      </nav>`}
      <h1>What the second map does</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the ${ce?"image":"text"} twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        <strong>Move λ</strong> and watch what the model attends to, ${ce?"which class it sees":"what it would write next"}, and how well it does.
      </p>
      ${o.left.note&&_`<p class="note">${o.left.note}</p>`}
    </header>
    ${m&&_`<p class="refusal" role="alert">${m.message}</p>`}
    <main class="layout">
      <div class="controls">
        <${Rr} model=${o.left} run=${le} place=${d.left} lambdas=${d.lambdas} onChange=${Kr} />
        <${jr} factors=${N} task=${R} points=${x} lambdas=${d.lambdas} />
        <${Lr} run=${le} right=${c.right} models=${o} theme=${n} />
        ${ce?_`<${Pr} data=${t} view=${d} onChange=${C} />`:_`
        <${Hr} data=${t} source=${e} view=${d} onChange=${C} onRefusal=${v} />
        <${_r} models=${o} runs=${c} view=${d} wanted=${i} source=${e} question=${I}
          onChange=${C} onRefusal=${v} />`}
      </div>
      <div class="pictures">
        <${qr} models=${o} runs=${c} maps=${f} view=${d} image=${ce} theme=${n} row=${Ae} hovered=${k}
          shared=${t.shared_vocabulary} onHover=${h} onChange=${C} live=${e.live} hasAddress=${e.hasAddress} />
        <div class="grids">${Vr}</div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${a.map(y=>`${o[y].name}: ${o[y].label}, ${To(o[y])}`).join("; ")}.
      </p>
    </footer>
  `}function To({layers:t,heads:e,kv_heads:r}){let o=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${o}`}var zo=(t,e)=>t.reduce((r,o)=>Math.abs(o.value-e)<Math.abs(r.value-e)?o:r),Fr=t=>t.reduce((e,r)=>e+r,0),rt=class{live=!1;hasAddress=location.protocol!=="about:";#e=new Map;constructor({recorded:e,models:r,examples:o,strip:a}){this.recorded=e,this.models=r,[this.example]=o,this.measured=a}shown(e){let r=Object.fromEntries(Object.entries(this.recorded).map(([n,{tokens:s,runs:i}])=>{let l=s.slice(s.length-i.length+1);return[n,l.slice(0,e.added[n].length)]})),{text:o,answer:a}=this.example;return{...e,text:o,answer:a,added:te(e.lambdas)?oe:{...oe,...r}}}async run({side:e,append:r=[],lambdas:o,answer:a,picture:n}){let{tokens:s,pieces:i,learned_lambdas:l,runs:d,moved:c}=this.recorded[e],u=s.length-d.length+1+r.length,f={tokens:s.slice(0,u),pieces:i.slice(0,u),learned_lambdas:l,...d[r.length]};if(o){let{factor:p,layers:x,heads:$}=o,m=Object.entries({...p===1?{}:{factor:p},...x,...$}),[v,k]=m[0];if(m.length>1||!(v in c))f.is_recorded=!1;else{let h=zo(c[v],k);Object.assign(f,h.run,{recorded_at:h.value})}}return n&&(f.heads=this.#t(e,u,o,a,n)),f}async map({side:e,append:r=[],layer:o,head:a,lambdas:n}){let{tokens:s,runs:i}=this.recorded[e];return yt(this.#r(e,o,a,n),s.length-i.length+1+r.length)}async next({side:e,append:r=[]}){let{tokens:o,runs:a}=this.recorded[e];return{token:o[o.length-a.length+1+r.length]}}strip=async({factor:e})=>this.measured.points[this.measured.factors.indexOf(e)];#t(e,r,o,a,n){let{layers:s,heads:i,subtracts:l}=this.models[e],d=Math.min(n,r),c=new Int8Array(s*i*d*d),f={rollout:o?null:this.recorded[e].rollout,removed:l?[]:null,on_answer:a?[]:null,picture_size:d,pictures:c};for(let p=1,x=0;p<=s;p++){f.removed?.push([]),f.on_answer?.push([]);for(let $=1;$<=i;$++,x++){let m=yt(this.#r(e,p,$,o),r),v=Je(m,be(o??$e,{layer:p,head:$}));if(l){let b=0;for(let w=0;w<v.length;w++)b+=Math.max(0,Math.min(m.first[w],m.first[w]-v[w]));f.removed.at(-1).push(b/r)}if(a){let b=K(v,r,a.query).map(Math.abs);f.on_answer.at(-1).push(Fr(b.subarray(a.begin,a.end))/(Fr(b)||1))}let k=ze(r,v),g=Mt(v,r,d).map(b=>Math.round(127*Math.sign(b)*Math.sqrt(Math.min(1,Math.abs(b)/k))));c.set(g,x*d*d)}}return f}#r(e,r,o,{factor:a}=$e){let n=`${e} ${r}.${o}`;this.#e.has(n)||this.#e.set(n,we(Xe(this.recorded[e].maps[`${r}.${o}`])));let{lam:s,...i}=this.#e.get(n);return{...i,lam:s?.map(l=>a*l)}}};var ot=class{live=!0;hasAddress=!1;#e=new Map;#t=0;constructor(e){this.model=e,e.on("msg:custom",({id:r,error:o,answer:a},n)=>{let s=this.#e.get(r);s&&(this.#e.delete(r),o?s.reject(new Me(o)):s.resolve(n?.length?qo(n[0]):a))})}#r(e,r){let o=`${this.#t++} ${Math.random()}`;return new Promise((a,n)=>{this.#e.set(o,{resolve:a,reject:n}),this.model.send({id:o,name:e,question:r})})}run=e=>this.#r("run",e);map=async(e,r)=>we(await this.#r("map",e),r);next=e=>this.#r("next",e);example=e=>this.#r("example",e);strip=e=>this.#r("strip",e)},qo=t=>t instanceof ArrayBuffer?t:t.buffer.slice(t.byteOffset,t.byteOffset+t.byteLength);function Gr(t,e,r,o=""){t.classList.add("explorer");let a=_`<${Br} data=${e} source=${r} root=${t} />`;Fe(_`<${bt.Provider} value=${o}>${a}<//>`,t)}function Io({model:t,el:e}){return e.addEventListener("focusin",({target:r})=>r.dataset.lmSuppressShortcuts="true"),Gr(e,t.get("described"),new ot(t),`explorer-${Math.random().toString(36).slice(2)}-`),()=>Fe(null,e)}var gs={render:Io},Wr=document.getElementById("explorer-data");if(Wr){let t=JSON.parse(Wr.textContent),e=t.mode==="recorded"?new rt(t):new et;Gr(document.getElementById("explorer"),t,e)}export{gs as default};
