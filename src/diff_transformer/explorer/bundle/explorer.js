/* sources 7f86359653bedb40208a1d493bb0a54015dbb67792c4ecb29119c014ed800f2c */
/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */
var T,Nt,Zr,ie,at,He,jt,Ne,Ht,lt,st,Dt,Oe=Symbol.for("pv"),De={},Ue=[],Qr=/^m(i|n|o|s|text|space)$/,ct=Array.isArray,pt=Ue.slice,ue=Object.assign;function de(t){t&&t.parentNode&&t.remove()}function dt(t,e,r){var o,a,n,s={},i=arguments.length;for(n in e)n=="key"?o=e[n]:n=="ref"&&typeof t!="function"?a=e[n]:s[n]=e[n];return i>2&&(s.children=i>3?pt.call(arguments,2):r),Se(t,s,o,a,null)}function Se(t,e,r,o,a){var n={type:t,props:e,key:r,ref:o,__k:null,__:null,__b:0,__e:null,__c:null,constructor:Oe,__v:a||++Nt,__i:-1,__u:0};return!a&&T.vnode&&T.vnode(n),n}function Be(t){return t.children}function Ce(t,e){this.props=t,this.context=e,this.__g=0}function le(t,e){if(e==null)return t.__&&le(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:le(t)}function eo(t){var e,r=t.__v,o=r.__e,a=[],n=[],s=t.__P;s&&((e=ue({constructor:Oe},r)).__v=r.__v+1,T.vnode&&T.vnode(e),ut(s,e,r,t.__n,s.namespaceURI,32&r.__u?[o]:null,a,o||le(r),32&r.__u,n),e.__v=r.__v,e.__.__k[e.__i]=e,Vt(a,e,n),r.__=r.__e=null,e.__e!=o&&Ut(e))}function Ut(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),Ut(t)}function it(t){(8&t.__g||(t.__g|=8,ie.push(t),He++))&&at==T.debounceRendering||((at=T.debounceRendering)||queueMicrotask)(Bt)}function Bt(){try{for(var t,e=1;ie.length;)ie.length>e&&ie.sort(jt),t=ie.shift(),e=ie.length,8&t.__g&&eo(t)}finally{(He=ie.length)&&(at||queueMicrotask)(Bt)}}function Ft(t,e,r,o,a,n,s,i,l,d,c){var h,f,p,b,x,m,w=o.__k||Ue,M=e.length;for(l=to(r,e,w,l,M),h=0;h<M;h++)(p=r.__k[h])!=null&&(f=~p.__i&&w[p.__i]||De,p.__i=h,m=ut(t,p,f,a,n,s,i,l,d,c),b=p.__e,(f.ref!=p.ref||8&f.__u)&&(f.ref&&ht(f.ref,null,p,f),p.ref&&c.push(p.ref,p.__c||b,p)),x=x||b,4&p.__u?(l=Wt(p,l,t,!f.__v),f.__e&&(f.__e=null)):typeof p.type=="function"&&m!==void 0?l=m:b&&(l=b.nextSibling),p.__u&=-21);return r.__e=x,l}function to(t,e,r,o,a){var n,s,i,l,d,c,h,f,p,b=r.length,x=b,m=0,w=0,M=t.__k=Array(a);for(n=0;n<a;n++)(s=e[n])!=null&&typeof s!="boolean"&&typeof s!="function"?(typeof s!="object"||s.constructor===String?s=M[n]=Se(null,s):ct(s)?s=M[n]=Se(Be,{children:s}):s.constructor===Oe&&s.__b?s=M[n]=Se(s.type,s.props,s.key,s.ref,s.__v):M[n]=s,l=n+m,s.__=t,s.__b=t.__b+1,i=null,~(d=s.__i=ro(s,r,l,x))&&(x--,(i=r[d])&&(i.__u|=2)),i&&i.__v?(s.__u|=16,d==l-1?m--:d==l+1?m++:d!=l&&(d>l?m--:m++,w=1)):(~d||(a>b?m--:a<b&&m++),typeof s.type!="function"&&(s.__u|=4))):M[n]=null;if(w){for(c=[],h=[],n=0;n<a;n++)if((s=M[n])&&16&s.__u){for(m=0,f=c.length;m<f;)c[p=m+f>>1]<s.__i?m=p+1:f=p;c[m]=s.__i,h[n]=m+1}for(m=c.length;n--;)h[n]&&(h[n]==m?m--:M[n].__u|=4)}if(x)for(n=0;n<b;n++)!(i=r[n])||2&i.__u||(i.__e==o&&(o=le(i)),ft(i,i));return o}function Wt(t,e,r,o){var a,n,s,i;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(n=0;n<a.length;n++)a[n]&&(a[n].__=t,e=Wt(a[n],e,r,!1));return e}for(e&&!e.parentNode&&(e=le(t))&&!e.parentNode&&(e=null),s=t.__e,i=e;i&&i.nodeType==8;)i=i.nextSibling;for(s!=i&&(!o&&r.moveBefore&&s.parentNode?r.moveBefore(s,e):r.insertBefore(s,e||null)),e=s;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function ro(t,e,r,o){var a,n=t.key,s=t.type,i=e[r],l=i&&!(2&i.__u);if(i===null&&n==null||l&&n==i.key&&s==i.type)return r;if(o>(l?1:0)){for(a=r-1;a>=0;a--)if((i=e[a])&&!(2&i.__u)&&n==i.key&&s==i.type)return a;for(a=r+1;a<e.length;a++)if((i=e[a])&&!(2&i.__u)&&n==i.key&&s==i.type)return a}return-1}function Lt(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function Le(t,e,r,o,a){var n,s;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof o=="string"&&(t.style.cssText=o=""),o)for(e in o)r&&e in r||Lt(t.style,e);if(r)for(e in r)o&&r[e]==o[e]||Lt(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof o!="function"&&(o=null),(t.__e||(t.__e={}))[e]=r,r&&o||(s=st[e]||(st[e]=oo(e)),(t.__a||(t.__a={}))[e]=lt,n=e!=(e=e.replace(Ht,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,s,n):t.removeEventListener(e,s,n));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function oo(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[Ne]==null)e[Ne]=lt++;else if(e[Ne]<this.__a[t])return;return r(T.event?T.event(e):e)}}}function ut(t,e,r,o,a,n,s,i,l,d){var c,h,f,p,b,x,m,w,M,u,_,$,v,k,A,C,z,E,N=e.type;if(e.constructor!==Oe)return null;128&r.__u&&(l=32&r.__u,c=r.__c.__z)&&(e.__u|=l,h=n=[],c.nodeType==8?i=je(c,n):n.push(c),i=n[0]||i),(c=T.__b)&&c(e);e:if(typeof N=="function"){f=s.length;try{if(w=e.props,M=(c=N.prototype)&&c.render,u=(c=N.contextType)&&o[c.__c],_=c?u?u.props.value:c.__:o,(p=r.__c)?(e.__c=p,2&p.__g&&(p.__g|=1)):(M?e.__c=p=new N(w,_):(e.__c=p=new Ce(w,_),p.constructor=N,p.render=ao),u&&u.sub(p),p.state||(p.state={}),p.__n=o,p.__g|=8,p.__h=[],p.__k=[]),M&&(p.__s||(p.__s=p.state),N.getDerivedStateFromProps&&(p.__s==p.state&&(p.__s=ue({},p.__s)),ue(p.__s,N.getDerivedStateFromProps(w,p.__s)))),b=p.props,x=p.state,p.__v=e,r.__c){if(w!==b&&M&&!N.getDerivedStateFromProps&&p.componentWillReceiveProps&&p.componentWillReceiveProps(w,_),e.__v==r.__v&&!(8&p.__g)||!(4&p.__g)&&p.shouldComponentUpdate&&p.shouldComponentUpdate(w,p.__s,_)===!1){e.__v!=r.__v&&(p.props=w,p.state=p.__s,p.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(D){D&&(D.__=e)}),Ue.push.apply(p.__h,p.__k),p.__k=[],p.__h.length&&s.push(p),i=le(r);break e}p.componentWillUpdate&&p.componentWillUpdate(w,p.__s,_),M&&p.componentDidUpdate&&p.__h.push(function(){p.componentDidUpdate(b,x,m)})}else M&&!N.getDerivedStateFromProps&&p.componentWillMount&&p.componentWillMount(),M&&p.componentDidMount&&p.__h.push(p.componentDidMount);p.context=_,p.props=w,p.__P=t,p.__g&=-5,$=T.__r,v=M?25:0;do p.__g&=-9,$&&$(e),c=p.render(p.props,p.state=p.__s,p.context);while(8&p.__g&&++v<25);M&&(Ue.push.apply(p.__h,p.__k),p.__k=[]),p.state=p.__s,p.getChildContext&&(o=ue({},o,p.getChildContext())),M&&r.__c&&p.getSnapshotBeforeUpdate&&(m=p.getSnapshotBeforeUpdate(b,x)),k=c&&c.type===Be&&c.key==null?c.props.children:c,w.__P&&(c=i,a=(t=w.__P).namespaceURI,l=n=null,r.props&&r.props.__P!=t&&(r.__k.some(function(D){D&&ft(D,D)}),r.__k=null),i=r.__k?le(r,0):null),i=Ft(t,ct(k)?k:[k],e,r,o,a,n,s,i,l,d),w.__P&&(e.__e=null,i=c),e.__u&=-161,h&&h.some(de),p.__h.length&&s.push(p),1&p.__g&&(p.__g&=-4)}catch(D){if(s.length=f,e.__v=null,l||n)if(D&&D.then){if(e.__u|=128|l,n){for(~(z=n.indexOf(i||void 0))||(z=n.length);(E=n[z-1])&&E.nodeType==8;)z--;for(;z<n.length;z++)if(E=n[z])if(n[z]=null,A){if(E==C)break}else{if(E.nodeType!=8)break;E.data.startsWith("$s")&&(C=je(A=E))}}if(!A){for(;i&&i.nodeType==8&&i.nextSibling;)i=i.nextSibling;A=i}(c=je(A=e.__c.__z||(e.__c.__z=A)))?(e.__e=A,i=c):e.__e=i,i=i&&i.nextSibling}else n&&n.some(de);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),D&&D.then||Gt(e),T.__e(D,e,r)}}else i=e.__e=no(r.__e,e,r,o,a,n,s,l,d,t);return(c=T.diffed)&&c(e),i}function je(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function Gt(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(Gt))}function Vt(t,e,r){for(var o=0;o<r.length;)ht(r[o++],r[o++],r[o++]);T.__c&&T.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(n){n.call(a)})}catch(n){T.__e(n,a.__v)}})}function no(t,e,r,o,a,n,s,i,l,d){var c,h,f,p,b,x,m,w,M=r.props||De,u=e.props,_=e.type;if(_=="svg"?a="http://www.w3.org/2000/svg":_=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),n){for(c=0;c<n.length;c++)if((b=n[c])&&(_?b.localName==_:b.nodeType==3)){t=b,n[c]=null;break}}if(!t){if(w=d.ownerDocument||document,!_)return w.createTextNode(u);t=w.createElementNS(a,_,u.is?u:d),i&&(T.__m&&T.__m(e,n),i=!1),n=null}if(_){if(d=_=="template"&&t.content||t,n=_=="textarea"&&u.defaultValue!=null?null:n&&pt.call(d.childNodes),!i&&n)for(M={},c=0;c<t.attributes.length;c++)M[(b=t.attributes[c]).name]=b.value;for(c in M)b=M[c],c=="dangerouslySetInnerHTML"?f=b:c=="children"||c in u||c=="value"&&"defaultValue"in u||c=="checked"&&"defaultChecked"in u||Le(t,c,null,b,a);for(c in u)b=u[c],c=="children"?p=b:c=="dangerouslySetInnerHTML"?h=b:c=="value"?x=b:c=="checked"?m=b:i&&typeof b!="function"||M[c]===b||Le(t,c,b,M[c],a);h?(i||f&&(h.__html==f.__html||h.__html==t.innerHTML)||(t.innerHTML=h.__html),e.__k=[]):(f&&(t.textContent=""),(_=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&Qr.test(_))&&(a="http://www.w3.org/1999/xhtml"),Ft(d,ct(p)?p:[p],e,r,o,a,n,s,n?n[0]:r.__k&&le(r,0),i,l),n&&n.some(de)),i&&_!="textarea"||(c="value",_=="progress"&&x==null?t.removeAttribute(c):x==null||x===t[c]&&(_!="progress"||x)||Le(t,c,x,M[c],a),c="checked",m!=null&&m!=t[c]&&Le(t,c,m,M[c],a))}else M===u||i&&t.data==u||(t.data=u);return t}function ht(t,e,r,o){try{typeof t=="function"?e?e.__x=t(e)||1:o&&(o=o.__c||o.__e)&&(e=o.__x)&&(o.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){T.__e(a,r)}}function ft(t,e,r){var o,a,n,s;if(T.unmount&&T.unmount(t),!(o=t.ref)||o.current&&o.current!=t.__e||ht(o,null,e,t),o=t.__c){if(o.componentWillUnmount)try{o.componentWillUnmount()}catch(i){T.__e(i,e)}o.__P=o.__n=null}if(o=t.__k)for(s=0;s<o.length;s++)o[s]&&ft(o[s],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(o=t.__c)&&(o=o.__z)&&(a=je(o,n=[]))&&(o==t.__e&&n.some(de),de(a),de(o)),r||de(t.__e),t.__e=t.__c=t.__=null}function ao(t,e,r){return this.constructor(t,r)}function Fe(t,e){var r,o,a,n;T.__&&T.__(t,e),e.nodeType==9&&(e=e.documentElement),o=(r=t&&32&t.__u)?null:e.__k,e.__k=Se(Be,{children:[t]}),a=[],n=[],ut(e,e.__k,o||De,De,e.namespaceURI,o?null:e.firstChild?pt.call(e.childNodes):null,a,o?o.__e:e.firstChild,r,n),Vt(a,e.__k,n),e.__k.props.children=null}function Kt(t){function e(r){var o,a;return this.getChildContext||(o=new Set,(a={})[e.__c]=this,this.getChildContext=function(){return a},this.shouldComponentUpdate=function(n){this.props.value!=n.value&&o.forEach(function(s){s.__g|=4,it(s)})},this.sub=function(n){o.add(n);var s=n.componentWillUnmount;n.componentWillUnmount=function(){o.delete(n),s&&s.call(n)}}),r.children}return e.__c="__cC"+Dt++,e.__=t,e.Provider=(e.Consumer=function(r,o){return r.children(o)}).contextType=e,e}T={__e:function(t,e,r,o){for(var a,n,s;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((s=(n=a.constructor)&&n.getDerivedStateFromError)&&a.setState(n.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,o||{}),s=1),s&&8&a.__g)return void(a.__g|=2)}catch(i){t=i}}throw He=0,t}},Nt=0,Zr=function(t){return t!=null&&t.constructor===Oe},Ce.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=ue({},this.state)),typeof t=="function"&&(t=t(ue({},r),this.props)),t&&(ue(r,t),this.__v&&(e&&this.__k.push(e),it(this)))},Ce.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),it(this))},Ce.prototype.render=Be,ie=[],He=0,jt=function(t,e){return t.__v.__b-e.__v.__b},Ne=Symbol(),Ht=/(PointerCapture)$|Capture$/i,lt=0,st={},Dt=0;var Xt=function(t,e,r,o){var a;e[0]=0;for(var n=1;n<e.length;n++){var s=e[n++],i=e[n]?(e[0]|=s?1:2,r[e[n++]]):e[++n];s===3?o[0]=i:s===4?o[1]=Object.assign(o[1]||{},i):s===5?(o[1]=o[1]||{})[e[++n]]=i:s===6?o[1][e[++n]]+=i+"":s?(a=t.apply(i,Xt(t,i,r,["",null])),o.push(a),i[0]?e[0]|=2:(e[n-2]=0,e[n]=a)):o.push(i)}return o},Jt=new Map;function Yt(t){var e=Jt.get(this);return e||(e=new Map,Jt.set(this,e)),(e=Xt(this,e.get(t)||(e.set(t,e=(function(r){for(var o,a,n=1,s="",i="",l=[0],d=function(f){n===1&&(f||(s=s.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?l.push(0,f,s):n===3&&(f||s)?(l.push(3,f,s),n=2):n===2&&s==="..."&&f?l.push(4,f,0):n===2&&s&&!f?l.push(5,0,!0,s):n>=5&&((s||!f&&n===5)&&(l.push(n,0,s,a),n=6),f&&(l.push(n,f,0,a),n=6)),s=""},c=0;c<r.length;c++){c&&(n===1&&d(),d(c));for(var h=0;h<r[c].length;h++)o=r[c][h],n===1?o==="<"?(d(),l=[l],n=3):s+=o:n===4?s==="--"&&o===">"?(n=1,s=""):s=o+s[0]:i?o===i?i="":s+=o:o==='"'||o==="'"?i=o:o===">"?(d(),n=1):n&&(o==="="?(n=5,a=s,s=""):o==="/"&&(n<5||r[c][h+1]===">")?(d(),n===3&&(l=l[0]),n=l,(l=l[0]).push(2,0,n),n=0):o===" "||o==="	"||o===`
`||o==="\r"?(d(),n=2):s+=o),n===3&&s==="!--"&&(n=4,l=l[0])}return d(),l})(t)),e),arguments,[])).length>1?e:e[0]}var g=Yt.bind(dt);var _e,L,mt,Zt,xt=Object.is,Pe=0,ir=[],_t=[],j=T,Qt=j.__b,er=j.__r,tr=j.diffed,rr=j.__c,or=j.unmount,nr=j.__;function We(t,e){j.__h&&j.__h(L,t,Pe||e),Pe=0;var r=L.__H||(L.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function G(t){return Pe=1,so(dr,t)}function so(t,e,r){var o=We(_e++,2);if(o.t=t,!o.__c&&(o.__=[r?r(e):dr(void 0,e),function(n){var s=(o.__N||o.__)[0],i=o.t(s,n);xt(s,i)||(o.__N=[i,o.__[1]],o.__c.setState({}))}],o.__c=L,!L.__f)){L.__f=!0;var a=L.shouldComponentUpdate;L.shouldComponentUpdate=function(n,s,i){var l=this.__H;if(!l)return!0;var d=!1,c=this.props!=n;if(l.__.some(function(f){f.__N&&(d=!0,xt(f.__[0],f.__N[0])||(c=!0))}),a){var h=a.call(this,n,s,i);return d?h||c:h}return!d||c}}return o.__}function q(t,e){var r=We(_e++,3);!j.__s&&pr(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,L.__H.__h.push(r))}function R(t){return Pe=5,ee(function(){return{current:t}},[])}function ee(t,e){var r=We(_e++,7);return pr(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function lr(t,e){return Pe=8,ee(function(){return t},e)}function cr(t){var e=L.context[t.__c],r=We(_e++,9);return r.c=t,e?(r.__==null&&(r.__=!0,e.sub(L)),e.props.value):t.__}function io(){var t;do{for(;t=_t.shift();)try{Ee(t)}catch(r){j.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=ir.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(Ee),e.__h.some(gt),e.__h=[]}catch(r){e.__h=[],j.__e(r,t.__v)}}}while(_t.length)}j.__b=function(t){L=null,Qt&&Qt(t)},j.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),nr&&nr(t,e)},j.__r=function(t){er&&er(t),_e=0;var e=(L=t.__c).__H;e&&(mt==L?L.__h=[]:(e.__h.some(Ee),e.__h.some(gt),_e=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),mt=L},j.diffed=function(t){tr&&tr(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&sr(ir.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),mt=L=null},j.__c=function(t,e){e.some(function(r){try{r.__h.some(Ee),r.__h=r.__h.filter(function(o){return!o.__||gt(o)})}catch(o){r.__h=[function(){throw o}]}}),rr&&rr(t,e)},j.unmount=function(t){or&&or(t);var e,r,o=t.__c;o&&o.__H&&(o.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,sr(_t.push(a))}else Ee(a)}catch(n){e=n}}),o.__H=void 0,e&&j.__e(e,o.__v))};var ar=typeof requestAnimationFrame=="function";function lo(t){var e,r=function(){clearTimeout(o),ar&&cancelAnimationFrame(e),setTimeout(t)},o=setTimeout(r,35);ar&&(e=requestAnimationFrame(r))}function sr(t){t!=1&&Zt==j.requestAnimationFrame||((Zt=j.requestAnimationFrame)||lo)(io)}function Ee(t){var e=L,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),L=e}function gt(t){var e=L;t.__c=t.__(),L=e}function pr(t,e){return!t||t.length!=e.length||e.some(function(r,o){return!xt(r,t[o])})}function dr(t,e){return typeof e=="function"?e(t):e}var co={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function ur(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let o=co[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(o.length-1),n=Math.min(Math.floor(a),o.length-2);for(let s=0;s<3;s++){let[i,l]=[o[n][s],o[n+1][s]];e[3*r+s]=i+(l-i)*(a-n)}}return e}var $t={light:ur("light"),dark:ur("dark")};function bt(){let{jpThemeLight:t}=document.body.dataset;if(t!==void 0)return t==="true"?"light":"dark";for(let e of["light","dark"])if(document.body.classList.contains(`${e}-theme`))return e;return matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"}var Ge=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),ge=t=>$t[t];function Ve(t,e,r){let o=3*Ge(t,e),[a,n,s]=$t[r].subarray(o,o+3);return`rgb(${a} ${n} ${s})`}function hr(t,e,r){let o=3*Ge(t,e),[a,n,s]=$t[r].subarray(o,o+3);return .299*a+.587*n+.114*s>140?"#14161a":"#ffffff"}var vt=Kt(""),U=()=>{let t=cr(vt);return e=>t+e};var ne={left:[],right:[]},$e={factor:1,layers:{},heads:{}},mr={text:"",added:ne,answer:null,lambdas:$e,left:{layer:1,head:1},right:{layer:1,head:1},row:null},po=({layer:t,head:e})=>`${t}.${e}`,fr=t=>t.split(",").filter(Boolean).map(Number);function Te(t){let e=new URLSearchParams;e.set("text",t.text);for(let s of["left","right"])e.set(s,po(t[s])),t.added[s].length&&e.set(`${s}-added`,t.added[s].join(","));let{factor:r,layers:o,heads:a}=t.lambdas,n=[...r===1?[]:[["factor",r]],...Object.entries(o),...Object.entries(a)];return n.length&&e.set("lambda",n.map(([s,i])=>`${s}:${i}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function wt(t,e,r){let o=new URLSearchParams(t.slice(1));if(!o.has("text"))return e;let a={...e,text:o.get("text"),answer:null,row:null,added:{...ne}};for(let i of["left","right"]){let[l,d]=(o.get(i)??"").split(".").map(Number),c=r[i];c&&l>=1&&l<=c.layers&&d>=1&&d<=c.heads&&(a[i]={layer:Math.floor(l),head:Math.floor(d)});let h=fr(o.get(`${i}-added`)??"");h.every(Number.isInteger)&&(a.added[i]=h)}a.lambdas={factor:1,layers:{},heads:{}};for(let i of(o.get("lambda")??"").split(",")){let[l,d]=i.split(":"),c=Number(d);d===void 0||!Number.isFinite(c)||(l==="factor"?a.lambdas.factor=c:/^\d+$/.test(l)?a.lambdas.layers[l]=c:/^\d+\.\d+$/.test(l)&&(a.lambdas.heads[l]=c))}let n=fr(o.get("answer")??"");n.length===3&&n.every(Number.isInteger)&&(a.answer={query:n[0],begin:n[1],end:n[2]});let s=Number(o.get("row")??NaN);return Number.isInteger(s)&&s>=0&&(a.row=s),a}var be=({layers:t,heads:e},{layer:r,head:o})=>e[`${r}.${o}`]??t[r]??null,te=({factor:t,layers:e,heads:r})=>t!==1||Object.keys(e).length>0||Object.keys(r).length>0;var yt=new Float32Array(65536);for(let t=0;t<yt.length;t++){let e=t>>10&31,r=t&1023,o=e===0?r*2**-24:(1+r/1024)*2**(e-15);yt[t]=t>>15?-o:o}var ve=t=>t*(t+1)/2,Ke=(t,e,r)=>t.length>ve(e)?r*e:ve(r);function we(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375474)throw new Error("These are no attention maps.");let o=r.getUint32(4,!0),a=r.getUint32(8,!0),n=r.getUint32(12,!0),s=r.getUint32(16,!0)?ve(o):o*o,i=20,l=null;if(n===2){l=new Float32Array(o),a&&l.set(e.lam.subarray(0,a));for(let c=a;c<o;c++,i+=4)l[c]=r.getFloat32(i,!0)}let d=["first","second"].slice(0,n).map(c=>{let h=new Float32Array(s),f=Ke(h,o,a);a&&h.set(e[c].subarray(0,f));for(let p=f;p<h.length;p++,i+=2)h[p]=yt[r.getUint16(i,!0)];return h});return{length:o,lam:l,first:d[0],second:d[1]??null}}function kt(t,e){if(e===t.length)return t;let{lam:r,first:o,second:a}=t,n=ve(e);return{length:e,lam:r?.subarray(0,e)??null,first:o.subarray(0,n),second:a?.subarray(0,n)??null}}function Je(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let o=0,a=0;o<t.length;o++){let n=e??t.lam[o];for(let s=Ke(r,t.length,o+1);a<s;a++)r[a]=t.first[a]-n*t.second[a]}return r}var J=(t,e,r)=>t.subarray(Ke(t,e,r),Ke(t,e,r+1));function ze(t,...e){let r=0;for(let o of e){let a=o.length<=ve(t);for(let n=a?ve(Math.floor(t/4)):0;n<o.length;n++){let s=Math.abs(o[n]);s>r&&(r=s)}}return r||1}function Xe(t){let e=atob(t),r=new Uint8Array(e.length);for(let o=0;o<e.length;o++)r[o]=e.charCodeAt(o);return r.buffer}var xr={"\n":"⏎","	":"⇥","\r":"␍"},qe=t=>[...t].map(e=>{if(e in xr)return xr[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function H(t,e=14){let r=qe(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),o=[...r];return o.length>e?`${o.slice(0,e-1).join("")}…`:r||"∅"}var I=(t,e=0)=>`${(100*t).toFixed(e)} %`;function S(t,e=3){if(t==null||Number.isNaN(t))return"–";let r=Math.abs(t);return(r<10**-e&&t!==0?r<.001?t.toExponential(1):t.toPrecision(2):t.toFixed(e)).replace("-","−")}var Ye=({grid:t})=>t?"Class":"Next token",Y=(t,e)=>`${t}.${e}`,Mt=({heads:t,noise_heads:e},r)=>e?Math.ceil(r*e/t):null;function ye(t,e){let r=Mt(t,e);if(r===null)return"";let o=t.heads/t.noise_heads;return`signal head ${e-(r-1)*o} of noise head ${r}`}function _r(t,e,r,o){let a=[];for(let s=1;s<r.length;s++){let i=J(e,r.length,s),l=0;for(let d=1;d<i.length;d++)Math.abs(i[d])>Math.abs(i[l])&&(l=d);a.push([Math.abs(i[l]),s,l,i[l]])}a.sort((s,i)=>i[0]-s[0]);let n=a.slice(0,3).map(([,s,i,l])=>{let[d,c]=[s,i].map(h=>`token ${h+1} “${H(o[h]??"")}”`);return`${d} gives ${S(l,2)} to ${c}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${n.join("; ")}.`}var uo=450;function gr({models:t,runs:e,view:r,wanted:o,source:a,question:n,onChange:s,onRefusal:i}){let l=U(),[d,c]=G(!1),[h,f]=G(0),p=R(!1),b=Object.keys(t),x=(a.live||!te(r.lambdas))&&b.every(u=>e[u]&&e[u].tokens.length<t[u].most_tokens),m=async()=>{if(p.current)return;p.current=!0;let{text:u,added:_}=o;try{let $=await Promise.all(b.map(v=>a.next({...n(v),temperature:h,seed:0})));s(v=>{if(v.text!==u||v.added!==_)return{};let k={...v.added};return b.forEach((A,C)=>k[A]=[...k[A],$[C].token]),{added:k,row:null}})}catch($){c(!1),i({side:"left",message:$.message})}finally{p.current=!1}};q(()=>{if(!d)return;if(!x){b.every(_=>e[_])&&c(!1);return}let u=setTimeout(m,uo);return()=>clearTimeout(u)});let w=()=>{c(!1);let{tokens:u=[],asked:_}=e.left??{},$=u.length-(_?.append?.length??0);s(({answer:v})=>({added:ne,row:null,answer:v?.query<$?v:null}))},M=u=>{let{pieces:_=[],asked:$}=e[u]??{};return _.slice(_.length-($?.append?.length??0))};return g`
    <section class="card generation" aria-labelledby=${l("generation-title")}>
      <h2 id=${l("generation-title")}>Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!x} onClick=${m}>Step</button>
        <button type="button" disabled=${!x&&!d} aria-pressed=${d}
          onClick=${()=>c(!d)}>${d?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${w}>Begin again</button>
        ${a.live&&g`<label class="temperature">Temperature
          <select value=${h} onChange=${u=>f(Number(u.target.value))}>
            ${[0,.5,.8,1,1.5].map(u=>g`<option key=${u} value=${u}>${u||"0, most likely"}</option>`)}
          </select>
        </label>`}
      </div>
      ${b.map(u=>r.added[u].length>0&&g`
        <p class="written" key=${u}><span class="quiet">${t[u].label} </span>
          ${M(u).map((_,$,v)=>g`<span class=${$===v.length-1?"last":""}>${qe(_)}</span>${t[u].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom${b.length>1?"; both models write one at a time":""}.
        ${!a.live&&` This saved page holds what the ${b.length>1?"models write":"model writes"} with the learned λ.`}</p>
    </section>`}function At(t,e,r){let o=new Float32Array(r*r);for(let a=0;a<e;a++){let n=r*Math.floor(a*r/e);J(t,e,a).forEach((s,i)=>{let l=n+Math.floor(i*r/e);Math.abs(s)>Math.abs(o[l])&&(o[l]=s)})}return o}function $r(t,e,r,o){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),n=a.createImageData(r,r),s=ge(o);for(let i=0;i<e.length;i++){let l=3*e[i];n.data[4*i]=s[l],n.data[4*i+1]=s[l+1],n.data[4*i+2]=s[l+2],n.data[4*i+3]=255}a.putImageData(n,0,0)}function Ze(t,e,r,o,a,n=640){let s=Math.min(r,n),i=At(e,r,s);$r(t,Uint16Array.from(i,l=>Ge(l,o)),s,a)}function br(t,e,r,o,a){let n=t.parentElement.getBoundingClientRect(),s=devicePixelRatio;[t.width,t.height]=[Math.ceil(n.width*s),Math.ceil(n.height*s)];let i=t.getContext("2d");i.imageSmoothingEnabled=!1;let l=document.createElement("canvas");e.forEach((d,c)=>{let h=d.getBoundingClientRect();St(l,r(c),o,a);let f=[h.left-n.left,h.top-n.top,h.width,h.height];i.drawImage(l,...f.map(p=>Math.round(p*s)))})}function St(t,e,r,o){$r(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,o)}function ce(){let t=R(null),[e,r]=G(0);return q(()=>{let o=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return o.observe(t.current),()=>o.disconnect()},[]),[t,e]}var vr=168,he={left:44,right:10,top:26,bottom:18};function Ct(t,e,r,o,a,n=vr){let s=J(t.first,t.length,o),i=J(e,t.length,o),l=t.second?r??t.lam[o]:0,d=t.second?J(t.second,t.length,o).map($=>l*$):null,[c,h]=[0,1e-9];for(let $ of[s,i,d??s])for(let v of $)v<c&&(c=v),v>h&&(h=v);let f={width:a-he.left-he.right,height:n-he.top-he.bottom},p=f.width/t.length,b=$=>he.left+($+.5)*p,x=$=>he.top+(h-$)/(h-c)*f.height,m=$=>`M${Array.from($,(v,k)=>`${b(k).toFixed(1)},${x(v).toFixed(1)}`).join("L")}`,w=Math.max(1,Math.min(14,p*.62)),M=Array.from(i,($,v)=>[b(v)-w/2,x(Math.max(0,$)),w,Math.abs(x($)-x(0)),$]),u=Array.from(i,($,v)=>[Math.abs($),v]).sort(($,v)=>v[0]-$[0]).slice(0,4).filter(([$])=>$>.08*h).map(([,$])=>$),_=u.filter(($,v)=>u.slice(0,v).every(k=>Math.abs(b($)-b(k))>56));return{first:m(s),taken:d&&m(d),bars:M,zero:x(0),x:b,y:x,low:c,high:h,labelled:_,left:i,end:a-he.right}}function wr({maps:t,net:e,lam:r,pieces:o,row:a,isPinned:n}){let[s,i]=ce(),l=i>120?Ct(t,e,r,a,i):null;return g`
    <figure class="curve" ref=${s}>
      <figcaption>
        <span>Row of token ${a+1} <b>${H(o[a]??"",24)}</b>${n?g` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&g`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${l&&g`
        <svg width=${i} height=${vr} role="img" aria-label=${ho(l,o,a)}>
          <line class="axis" x1="44" x2=${l.end} y1=${l.zero} y2=${l.zero} />
          <text class="tick" x="38" y=${l.y(l.high)} dy="0.32em" text-anchor="end">${S(l.high,2)}</text>
          <text class="tick" x="38" y=${l.zero} dy="0.32em" text-anchor="end">0</text>
          ${l.low<-.12*l.high&&g`<text class="tick" x="38" y=${l.y(l.low)} dy="0.32em" text-anchor="end">${S(l.low,2)}</text>`}
          ${l.bars.map(([d,c,h,f,p],b)=>g`<rect key=${b} class=${p<0?"net negative":"net"} x=${d} y=${p<0?l.zero:c} width=${h} height=${f} />`)}
          <path class="first" d=${l.first} />
          ${l.taken&&g`<path class="taken" d=${l.taken} />`}
          ${l.labelled.map(d=>g`<text key=${`l${d}`} class="peak" x=${Math.max(60,Math.min(l.end-20,l.x(d)))}
            y=${l.y(Math.max(l.left[d],0))-7} text-anchor="middle">${H(o[d]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var ho=(t,e,r)=>`What token ${r+1} “${H(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(o=>`token ${o+1} “${H(e[o]??"")}” with ${S(t.left[o],2)}`).join(", ")}.`;var Ie={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Qe={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},fo="system-ui, -apple-system, 'Segoe UI', sans-serif",mo=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function B(t,e,r,{size:o=12,colour:a,anchor:n="start",weight:s=400,turn:i=0}){let l=i?` transform="rotate(${i} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${o}" fill="${a}" text-anchor="${n}" font-weight="${s}"${l}>${mo(r)}</text>`}function Ot(t,e,r,o){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${fo}">`,`<rect width="${t}" height="${e}" fill="${Ie[r][2]}"/>`,...o,"</svg>"].join(`
`)}var kr=(t,e,r,o)=>`<image x="${e}" y="${r}" width="${o}" height="${o}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function xo({models:t,view:e,panels:r,pieces:o,row:a,scale:n,lam:s,theme:i,left:l,net:d}){let[c,h]=Ie[i],f=300,p=52,b=28,x=40+r.length*(f+p)+(r.length-1)*b,m=[B(20,34,`${t.left.name}: layer ${e.left.layer}, head ${[e.left.head,ye(t.left,e.left.head)].filter(Boolean).join(", ")}${s==null?"":`, λ = ${S(s,2)}`}`,{size:17,colour:c,weight:600})];r.forEach(($,v)=>{let k=20+p+v*(f+p+b),A=66+p,C=document.createElement("canvas");Ze(C,$.weights,$.maps.length,n,i),m.push(B(k,A-p-8,$.name,{size:14,colour:c,weight:600}),kr(C,k,A,f));let z=f/$.maps.length;for(let E=0;E<$.maps.length;E+=Math.max(1,Math.ceil(11/z))){let N=H(o[$.side][E]??"",8),D=(E+.5)*z+3.5;m.push(B(k-4,A+D,N,{size:9.5,colour:h,anchor:"end"})),m.push(B(k+D,A-4,N,{size:9.5,colour:h,turn:-90}))}m.push(`<rect x="${k}" y="${A+Math.min(a,$.maps.length-1)*z}" width="${f}" height="${Math.max(1.5,z)}" fill="none" stroke="${c}"/>`)});let w=66+p+f+40,M=Math.min(a,l.length-1),u=Ct(l,d,l.second?s:null,M,x-40);m.push(B(20,w,`Row of token ${M+1} “${H(o.left[M]??"",24)}”`,{size:13,colour:c,weight:600})),m.push(`<g transform="translate(20 ${w+6})">`),m.push(...u.bars.map(([$,v,k,A,C])=>`<rect x="${$}" y="${C<0?u.zero:v}" width="${k}" height="${A}" fill="${c}" opacity="0.32"/>`)),m.push(`<path d="${u.first}" fill="none" stroke="${Qe[i][0]}" stroke-width="1.6"/>`),u.taken&&m.push(`<path d="${u.taken}" fill="none" stroke="${Qe[i][1]}" stroke-width="1.6"/>`),m.push(`<line x1="44" x2="${u.end}" y1="${u.zero}" y2="${u.zero}" stroke="${h}"/>`),m.push(...u.labelled.map($=>B(u.x($),u.y(Math.max(0,u.left[$]))-7,H(o.left[$]??"",12),{size:11,colour:c,anchor:"middle"}))),m.push(B(38,u.y(u.high)+4,S(u.high,2),{size:10,colour:h,anchor:"end"}),"</g>");let _=w+200;return m.push(..._o(36,_,n,i)),l.second&&m.push(B(x-20,_+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:h,anchor:"end"})),Ot(x,_+44,i,m)}function _o(t,e,r,o){let a=ge(o),n=[];for(let s=0;s<64;s++){let i=3*Math.round(510*s/63);n.push(`<rect x="${t+4*s}" y="${e}" width="4.2" height="10" fill="rgb(${a[i]},${a[i+1]},${a[i+2]})"/>`)}return[-1,0,1].forEach(s=>n.push(B(t+128*(1+s),e+24,S(s*r,2),{size:10,colour:Ie[o][1],anchor:"middle"}))),n}function go(t,e,r,o){let[a,n]=Ie[o],s=t.heads>8?48:96,i=s+(t.heads>8?8:24),l=[B(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let d=1;d<=t.layers;d++){let c=56+(d-1)*i;l.push(B(34,c+s/2+4,String(d),{size:11,colour:n,anchor:"end"}));for(let h=1;h<=t.heads;h++){let f=44+(h-1)*(s+8),p=document.createElement("canvas");if(St(p,r((d-1)*t.heads+h-1),e.picture_size,o),l.push(kr(p,f,c,s)),s>60){let b=e.removed?.[d-1][h-1],x=b===void 0?Y(d,h):`${Y(d,h)}  −${I(b)}`;l.push(B(f,c+s+14,x,{size:10.5,colour:n}))}}}return Ot(64+t.heads*(s+8),64+t.layers*i+8,o,l)}function yr(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function Et(t,e,r){let o=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){yr(o,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(o),await a.decode();let n=document.createElement("canvas");[n.width,n.height]=[2*a.width,2*a.height],n.getContext("2d").drawImage(a,0,0,n.width,n.height),URL.revokeObjectURL(a.src),n.toBlob(s=>yr(s,`${e}.png`),"image/png")}function $o(t,{next:e,divergence:r,loss:o,learned_loss:a},n){let[s,i]=Ie[n],l=e.slice(0,10),d=Math.max(...l.flatMap(_=>[_.probability,_.learned_probability]),1e-9),c=r>0,[h,f,p]=[140,260,24],b=h+f+(c?140:80),x=[B(20,34,`${t.name}: ${Ye(t).toLowerCase()}`,{size:17,colour:s,weight:600})];l.forEach((_,$)=>{let v=56+$*p,[k,A]=[_.probability,_.learned_probability].map(C=>f*C/d);x.push(B(h-8,v+14,H(_.piece),{colour:s,anchor:"end"}),`<rect x="${h}" y="${v+3}" width="${Math.max(1,k)}" height="${p-8}" fill="${Qe[n][0]}"/>`,B(h+f+58,v+14,I(_.probability,1),{colour:s,anchor:"end"})),c&&x.push(`<rect x="${h+A-1}" y="${v}" width="2" height="${p-2}" fill="${Qe[n][1]}"/>`,B(h+f+120,v+14,I(_.learned_probability,1),{colour:i,anchor:"end"}))});let m=56+l.length*p+22,w=c?`${S(o)} (${S(a)})`:S(o),M=t.grid?"":`loss on the text ${w}`,u=c?`KL ${S(r)} nats${M&&`, ${M}`}; orange, grey: learned λ`:M;return x.push(B(20,m,u,{size:11,colour:i})),Ot(b,m+18,n,x)}var Mr=(t,e)=>Et(xo(t),`head-${Y(t.view.left.layer,t.view.left.head)}`,e),Ar=(t,e,r,o)=>Et($o(t,e,r),`next-${t.name}`,o),Sr=(t,e,r,o,a)=>Et(go(t,e,r,o),`heads-${t.name}`,a);var ke=({disabled:t,onSave:e})=>["PNG","SVG"].map(r=>g`<button type="button" key=${r} class="link" disabled=${t} onClick=${()=>e(r.toLowerCase())}>${r}</button>`);var bo={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function Cr({side:t,model:e,heads:r,isBusy:o,chosen:a,theme:n,onChoose:s}){let i=U(),l=R(null),d=R(null),[c,h]=ce(),f=ee(()=>{if(!r)return null;let u=typeof r.pictures=="string"?new Int8Array(Xe(r.pictures)):r.pictures,_=r.picture_size**2;return $=>u.subarray($*_,($+1)*_)},[r?.pictures]);q(()=>{f&&br(d.current,c.current.querySelectorAll(".picture"),f,r.picture_size,n)},[r,n,h]),q(()=>{let u=c.current.parentElement,[_,$]=[u,l.current.querySelector(".chosen")].map(A=>A.getBoundingClientRect()),[v,k]=[$.left-$.width,$.right+$.width];u.scrollLeft+=Math.max(0,k-_.right)+Math.min(0,v-_.left)},[a.layer,a.head]);let p=u=>{let _=bo[u.key];if(!_)return;u.preventDefault();let $=Math.min(e.layers,Math.max(1,a.layer+_[0])),v=Math.min(e.heads,Math.max(1,a.head+_[1]));s({layer:$,head:v}),l.current.querySelector(`[data-head="${Y($,v)}"]`)?.focus()},b=u=>Array.from({length:u},(_,$)=>$+1),x=(u,_)=>r?.removed?.[u-1][_-1],m=(u,_)=>r?.on_answer?.[u-1][_-1],w=(u,_)=>[`Head ${Y(u,_)}`,ye(e,_),x(u,_)!==void 0&&`the subtraction removes ${I(x(u,_))} of A1`,m(u,_)!==void 0&&`${I(m(u,_))} on the answer`].filter(Boolean).join(", "),M=e.heads>8;return g`
    <section class=${`card grid-card ${M?"dense":""}`} aria-labelledby=${i(`grid-${t}`)}>
      <div class="card-head">
        <h2 id=${i(`grid-${t}`)}>${e.label}, all heads</h2>
        <span class="buttons">
          <${ke} disabled=${!r} onSave=${u=>Sr(e,r,f,n,u)} />
        </span>
      </div>
      <div class="scroll"><div class="sheet" ref=${c}>
        <canvas ref=${d} width="8" height="8" aria-hidden="true"></canvas>
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} aria-busy=${o} ref=${l} onKeyDown=${p}
          style=${`--heads:${e.heads};--thumb:${M?44:e.heads>4?92:124}px`}>
          ${b(e.layers).map(u=>g`
            <div class="grid-row" role="row" key=${u}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${u}</span>
              ${b(e.heads).map(_=>{let $=a.layer===u&&a.head===_;return g`
                  <button type="button" role="gridcell" key=${_} class=${`head ${$?"chosen":""}`}
                    aria-selected=${$} tabindex=${$?0:-1} data-head=${Y(u,_)}
                    aria-label=${w(u,_)} title=${w(u,_)} onClick=${()=>s({layer:u,head:_})}>
                    <span class="picture"></span>
                    ${!M&&g`<span class="numbers" aria-hidden="true">
                      ${x(u,_)!==void 0&&g`<span>${x(u,_)>.005?"−":""}${I(x(u,_))}</span>`}
                      ${m(u,_)!==void 0&&g`<span class="on-answer">◎ ${I(m(u,_))}</span>`}
                    </span>`}
                    ${M&&x(u,_)!==void 0&&g`<span class="gauge" aria-hidden="true" style=${{width:`${100*x(u,_)}%`}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div></div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(M?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${r?.on_answer&&!M?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var vo=46,wo=11;function Or({panel:t,pieces:e,size:r,hasStrip:o,scale:a,theme:n,row:s,answer:i,added:l,onHover:d,onPin:c}){let h=R(null),{maps:f,weights:p,name:b}=t;q(()=>{Ze(h.current,p,f.length,a,n)},[p,f.length,a,n]);let x=o?vo:0,m=r-x,w=m/f.length,M=Math.max(1,Math.ceil(wo/w)),u=[];if(x)for(let k=0;k<f.length;k+=M)u.push(k);let _=k=>{let A=h.current.getBoundingClientRect(),C=Math.floor((k.clientY-A.top)/A.height*f.length);return Math.max(0,Math.min(f.length-1,C))},$=k=>x+(k+.5)*w,v=i&&i.end<=f.length;return g`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${b}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${h} width="8" height="8" role="img" aria-label=${_r(b,p,f,e)}
          data-map=${t.key} style=${{left:`${x}px`,top:`${x}px`,width:`${m}px`,height:`${m}px`}}
          onPointerMove=${k=>d(_(k))} onPointerLeave=${()=>d(null)}
          onClick=${k=>c(_(k))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${u.map(k=>g`
            <text key=${`r${k}`} x=${x-4} y=${$(k)} class=${k===s?"on":""} dy="0.32em"
              text-anchor="end">${H(e[k]??"",7)}</text>
            <text key=${`c${k}`} transform=${`translate(${$(k)} ${x-4}) rotate(-90)`} dy="0.32em">${H(e[k]??"",7)}</text>`)}
          ${v&&g`<rect class="answer" x=${x+i.begin*w} y=${x}
            width=${Math.max(1.5,(i.end-i.begin)*w)} height=${m} />`}
          ${l>0&&g`<line class="added" x1=${x} x2=${r} y1=${x+(f.length-l)*w}
            y2=${x+(f.length-l)*w} />`}
          <rect class="row" x=${x} y=${x+s*w} width=${m} height=${Math.max(2,w)} />
        </svg>
      </div>
    </figure>`}function Er({examples:t,models:e},{text:r}){let{grid:o,most_tokens:a}=e.left;if(!o)return null;let[n,s]=o,i=t.findIndex(({title:l})=>l===r);return{picture:t[i]?.picture,first:i*a,rows:n,columns:s,others:a-n*s}}var Pt=({image:{picture:t,rows:e,columns:r},children:o})=>g`
  <div class="patches" style=${{backgroundImage:t?`url(${t})`:"none",gridTemplateColumns:`repeat(${r}, 1fr)`,aspectRatio:`${r} / ${e}`}}>
    ${o}
  </div>`;function Pr({models:t,runs:e,image:r,row:o,theme:a}){let n=i=>!i.waitsForHeads&&i.tokens[0]===r.first,s=Object.keys(t).filter(i=>e[i]?.heads?.rollout);return g`
    <div class="rollouts">
      ${s.map(i=>{let{rollout:l}=e[i].heads,d=l[Math.min(o,l.length-1)].slice(-r.rows*r.columns),c=Math.max(...d,1e-9);return g`
          <figure key=${i} data-rollout=${i} style=${{visibility:n(e[i])?"visible":"hidden"}}>
            <figcaption>${t[i].label}: what reaches token <b>${o+1}</b> through all layers (attention rollout)</figcaption>
            <${Pt} image=${r}>
              ${d.map((h,f)=>g`<span key=${f} class="token" style=${{background:Ve(h,c,a)}} title=${S(h)}></span>`)}
            <//>
          </figure>`})}
    </div>`}function Tr({data:t,view:e,onChange:r}){let o=U();return g`
    <section class="card images" aria-labelledby=${o("images-title")}>
      <h2 id=${o("images-title")}>Image</h2>
      <p class="examples">
        ${t.examples.map(({title:a,picture:n})=>g`<button type="button" class="thumb" key=${a} aria-pressed=${a===e.text}
            onClick=${()=>r({text:a,row:null})}><img src=${n} alt=${a} /></button>`)}
      </p>
    </section>`}function zr({scale:t,theme:e}){let r=R(null);q(()=>{let a=r.current.getContext("2d"),n=a.createImageData(511,1),s=ge(e);for(let i=0;i<511;i++){for(let l=0;l<3;l++)n.data[4*i+l]=s[3*i+l];n.data[4*i+3]=255}a.putImageData(n,0,0)},[e]);let o=[-1,-.25,0,.25,1];return g`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${S(t,2)} over the background at 0 to blue at ${S(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${o.map(a=>g`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${Math.abs(a)===1?`${a<0?"≤ ":"≥ "}${S(a*t,2)}`:S(a*t,2)}</span>`)}
      </div>
    </div>`}function qr({pieces:t,values:e,scale:r,theme:o,row:a,pinned:n,answer:s,added:i,between:l,image:d,onHover:c,onPin:h,onAnswer:f}){let p=U(),b=R(null),x=R(!1),m=()=>b.current.querySelector(".on")?.scrollIntoView({block:"nearest"});q(()=>{x.current&&m(),x.current=!1},[a]);let w=s!==null&&n>=s.begin&&n<s.end,M=v=>{let k=d?a<d.others?d.others-a:d.columns:10,C={ArrowLeft:-1,ArrowRight:1,ArrowUp:-k,ArrowDown:k,Home:-t.length,End:t.length}[v.key];if(v.key==="Escape"&&n!==null)h(n);else if(C!==void 0){v.preventDefault();let z=Math.max(0,Math.min(t.length-1,a+C));x.current=!0,c(null),z!==n&&h(z)}},u=v=>{let k=v.target.closest("[data-token]");return k?Number(k.dataset.token):null},_=v=>["token",v===a&&"on",v===n&&"pinned",s&&v>=s.begin&&v<s.end&&"answer",v>=t.length-i&&"new"].filter(Boolean).join(" "),$=t.map((v,k)=>{let A=k<e.length?e[k]:0,C=k<e.length?{background:Ve(A,r,o),color:hr(A,r,o)}:{},z=d&&k>=d.others;return g`<span key=${k} id=${p(`token-${k}`)} class=${_(k)} style=${C} role="option"
      data-token=${k} aria-selected=${k===a} aria-label=${z?`patch ${v}`:null}
      title=${`${z?`patch ${v}`:`token ${k+1}`}: ${S(A)}`}>${z?"":qe(v)}</span>${v.includes(`
`)?g`<br />`:""}`});return g`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${n!==null?", Esc lets go":""}.</span>
      ${f&&n!==null&&n<t.length-1&&g`<button type="button" class="link"
          onClick=${()=>f(w?null:{query:t.length-1,begin:n,end:n+1})}>${w?"No longer the answer":"Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${l||d?"spaced":""}`} role="listbox" tabindex="0" onFocus=${m} aria-label=${d?"Patches of the image":"Tokens of the text"} ref=${b}
      aria-activedescendant=${p(`token-${a}`)} onKeyDown=${M} onPointerOver=${v=>c(u(v))}
      onPointerLeave=${()=>c(null)} onClick=${v=>u(v)!==null&&h(u(v))}>
      ${d?g`${$.slice(0,d.others)}<${Pt} image=${d}>${$.slice(d.others)}<//>`:$}
    </div>`}function yo({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let o=t/e,a=Math.ceil(r/o);return`shares key/value head ${a} with heads ${(a-1)*o+1}–${a*o}`.replace(/heads (\d+)–\1$/,"head $1")}function Ir({models:t,runs:e,maps:r,view:o,image:a,theme:n,row:s,hovered:i,shared:l,onHover:d,onChange:c,live:h,hasAddress:f}){let p=U(),[b,x]=ce(),[m,w]=[r.left,r.right],M=m&&m.head.layer===o.left.layer&&m.head.head===o.left.head,u=t.left.subtracts?be(o.lambdas,o.left):null,_=t.left.lambda_per_token?void 0:e.left?.learned_lambdas?.[o.left.layer-1][o.left.head-1],$=M?u??(_===void 0?null:o.lambdas.factor*_):null,v=ee(()=>m?Je(m,$):null,[m,$]),k=ee(()=>m?Math.max(ze(m.length,m.first,m.second??[],v),w?ze(w.length,w.first):0):1,[m,w,v]),A={left:e.left?.pieces??[],right:e.right?.pieces??[]},C=m?$??m.lam?.[Math.min(s,m.length-1)]:null,z=Y(o.left.layer,o.left.head),E=[];if(m?.second){let O=Mt(t.left,m.head.head),Ae=O===null?"A₂":`A₂ of noise head ${O}`;E.push({key:"first",name:"A₁",side:"left",maps:m,weights:m.first}),E.push({key:"second",name:Ae,side:"left",maps:m,weights:m.second}),E.push({key:"net",name:"A₁ − λA₂",side:"left",maps:m,weights:v,strong:!0})}if(w){let O=`${t.right.label} ${Y(w.head.layer,w.head.head)}`;E.push({key:"right",name:O,side:"right",maps:w,weights:w.first})}let N=x>=(E.length===3?540:700)?E.length:Math.min(2,E.length),D=x>=860?20:12,me=Math.max(0,Math.floor((x-D*(N-1))/Math.max(1,N))),re=O=>c(Ae=>({row:Ae.row===O?null:O})),xe=[ye(t.left,o.left.head),yo(t.left,o.left)];t.left.lambda_per_token&&xe.push("a λ for every token");let nt={models:t,view:o,panels:E,pieces:A,row:s,scale:k,lam:C,theme:n,left:m,net:v,right:w};return g`
    <section class="card head-view" aria-labelledby=${p("head-title")}>
      <div class="card-head">
        <h2 id=${p("head-title")}>
          Layer ${o.left.layer}, head ${o.left.head}
          ${C!=null&&g` <span class="quiet">λ = ${S(C,2)}</span>`}
          ${xe.filter(Boolean).map(O=>g` <span class="quiet note">${O}</span>`)}
        </h2>
        <span class="buttons">
          ${f&&g`<button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href.split("#")[0]+Te(o))}>Copy link</button>`}
          <${ke} disabled=${!m} onSave=${O=>Mr(nt,O)} />
        </span>
      </div>
      <div ref=${b} class="panels" style=${{gridTemplateColumns:`repeat(${N||1}, 1fr)`,gap:`${D}px`}}>
        ${me>0&&E.map(O=>g`
          <${Or} key=${O.key} panel=${O} pieces=${A[O.side]} size=${me} hasStrip=${me>=200||N>2} scale=${k} theme=${n}
            row=${Math.min(s,O.maps.length-1)} answer=${O.side==="left"||l?o.answer:null}
            added=${o.added[O.side].length} head=${O.side==="left"?z:null}
            onHover=${d} onPin=${re} />`)}
      </div>
      <${zr} scale=${k} theme=${n} />
      ${m&&g`
        <${qr} pieces=${A.left.slice(0,m.length)} values=${J(v,m.length,Math.min(s,m.length-1))} scale=${k} theme=${n}
          between=${t.left.between} row=${Math.min(s,m.length-1)} pinned=${o.row} answer=${o.answer} added=${o.added.left.length}
          image=${a} onHover=${d} onPin=${re} onAnswer=${h&&!a?O=>c({answer:O}):null} />
        ${a&&g`<${Pr} models=${t} runs=${e} image=${a} row=${s} theme=${n} />`}
        <${wr} maps=${m} net=${v} lam=${$} pieces=${A.left} row=${Math.min(s,m.length-1)}
          isPinned=${o.row!==null&&i===null} />`}
      ${!h&&te(o.lambdas)&&g`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the live explorer computes them anew.</p>`}
    </section>`}var ko=-.5,Mo=1.5,Z=[-.5,2],Ao=t=>t.reduce((e,r)=>e+r,0)/t.length;function Tt({id:t,name:e,value:r,learned:o,isSet:a,inherited:n,main:s,onInput:i,onLearned:l}){let[d,c]=s?Z:[Math.min(ko,Math.floor(10*o)/10),Math.max(Mo,Math.ceil(10*o)/10)],h=s?"×":"=",f=b=>(b-d)/(c-d),p=Math.max(d,Math.min(c,r));return g`
    <div class=${`slider ${s?"main":""} ${a?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}</label>
        <output for=${t}>λ ${h} ${S(r,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${f(0)};--learned-part:${f(o)}`}>
        <input id=${t} type="range" min=${d} max=${c} step="0.01" value=${p}
          aria-valuetext=${`λ ${h} ${S(r,2)}; learned ${S(o,2)}`}
          onInput=${b=>i(Number(b.target.value))} />
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
    </div>`}var Rr=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function Lr({model:t,run:e,place:r,lambdas:o,onChange:a}){let n=U();if(!e?.learned_lambdas)return g`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let s=e.learned_lambdas,{layer:i,head:l}=r,d=`${i}.${l}`,{factor:c,layers:h,heads:f}=o,p=Ao(s[i-1]),b=[...Object.values(h),...Object.values(f)],x=[...b,...s.flat().map(m=>c*m)].some(m=>m<0);return g`
    <section class="card lambda" aria-labelledby=${n("lambda-title")}>
      <div class="card-head">
        <h2 id=${n("lambda-title")}>Move λ</h2>
        <button type="button" class="link" disabled=${!te(o)}
          onClick=${()=>a($e)}>All as learned</button>
      </div>
      <${Tt} id=${n("lambda-factor")} main name="All heads" value=${c} learned=${1} isSet=${c!==1}
        onInput=${m=>a({factor:m,layers:{},heads:{}})}
        onLearned=${()=>a({...o,factor:1})} />
    </section>
    <div class="finer">
      <details open=${b.length>0||void 0}>
        <summary>One layer, one head</summary>
        <${Tt} id=${n("lambda-layer")} name=${`Layer ${i}`} value=${h[i]??c*p}
          learned=${p} isSet=${i in h} inherited=${c!==1}
          onInput=${m=>a({...o,layers:{...h,[i]:m}})}
          onLearned=${()=>a({...o,layers:Rr(h,i)})} />
        <${Tt} id=${n("lambda-head")} name=${`Head ${d}`} value=${be(o,r)??c*s[i-1][l-1]}
          learned=${s[i-1][l-1]} isSet=${d in f} inherited=${c!==1||i in h}
          onInput=${m=>a({...o,heads:{...f,[d]:m}})}
          onLearned=${()=>a({...o,heads:Rr(f,d)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${x?" A λ below 0 adds the second map instead of taking it away.":""}
        ${t.lambda_per_token?" The model computes a λ for every token; the slider of a layer or of a head gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ ${c===1?"=":"×"} ${S(e.recorded_at,2)}.`:""}
      </p>
    </div>`}function fe({name:t,value:e,before:r,title:o}){return g`
    <tr title=${o}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function Nr({run:t,right:e,models:r,theme:o}){let a=U(),{grid:n}=r.left,s=Ye(r.left);if(!t)return g`<section class="card predictions" aria-busy="true"><h2>${s}</h2></section>`;if(t.is_recorded===!1)return g`<section class="card predictions">
      <h2>${s}</h2>
      <p class="quiet">What the model predicts with these λ was not recorded in this saved page; <code>${n?"explore_images":"diff-transformer explore"}</code> computes it.</p>
    </section>`;let i=t.next.slice(0,10),l=Math.max(...t.next.flatMap(h=>[h.probability,h.learned_probability]),1e-9),d=h=>({width:`${100*h/l}%`}),c=t.divergence>0;return g`
    <section class="card predictions" aria-labelledby=${a("next-title")}>
      <div class="card-head">
        <h2 id=${a("next-title")}>${s}</h2>
        <span class="buttons"><${ke} onSave=${h=>Ar(r.left,t,o,h)} /></span>
      </div>
      <table class="bars">
        <caption class="hidden">The most likely, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>name</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${i.map(h=>g`
            <tr key=${h.token}>
              <th scope="row">${H(h.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${d(h.probability)}></span>
                <span class="was" style=${{left:`${100*h.learned_probability/l}%`}}></span>
              </td>
              <td class="value">${I(h.probability,1)}</td>
              <td class="value was-value">${c?I(h.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${c&&g`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${fe} name="KL to the learned λ" value=${`${S(t.divergence)} nats`}
            title="KL(learned ‖ now) of what is predicted" />
          ${!n&&g`<${fe} name="Loss on the text" value=${S(t.loss)} before=${S(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />`}
          ${t.answer_probability!==void 0&&g`<${fe} name="Probability of the answer"
            value=${I(t.answer_probability,1)} before=${I(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&g`<${fe} name="Attention on the answer" value=${I(t.answer_share,1)}
            before=${I(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&g`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          ${!n&&g`<${fe} name="Loss on the text" value=${S(e.loss)} />`}
          ${e.answer_probability!==void 0&&g`<${fe} name="Probability of the answer" value=${I(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&g`<${fe} name="Attention on the answer" value=${I(e.answer_share,1)} />`}
          <tr><th scope="row">${s}</th><td colspan="2">${e.next.slice(0,2).map(h=>`“${H(h.piece)}” ${I(h.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var Me=class extends Error{},et=class{live=!0;hasAddress=!0;constructor(e="api/"){this.address=e}async#e(e,r){let o;try{o=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new Me("The explorer does not answer; its command may have ended.")}if(!o.ok){let a=await o.json().catch(()=>({}));throw new Me(a.error??`The explorer answered ${o.status}.`)}return o}run=async e=>(await this.#e("run",e)).json();map=async(e,r)=>we(await(await this.#e("map",e)).arrayBuffer(),r);next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json();strip=async e=>(await this.#e("strip",e)).json()},Re=class{#e=!1;#t=null;answered=Promise.resolve();ask(e){if(this.#e){this.#t=e;return}this.#e=!0,this.answered=e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};var tt=132,[zt,So]=[22,20],qt=20,jr=.05;function Co(t,e,r){let o=t.findIndex(i=>i>=r);if(o<0||o===0&&t[0]!==r)return null;let[a,n]=[o,Math.max(0,o-1)].map(i=>e[t[i]]?.value);if(a===void 0||n===void 0)return null;let s=o?(r-t[o-1])/(t[o]-t[o-1]):1;return n+s*(a-n)}function Oo(t,e,r){let o=(n,s=0)=>I(n,s).replace(" "," ");return t?`${e.value<=t.floor+jr&&r.value>t.floor+jr?`the model guesses: ${o(e.value)} of its`:`${o(e.value)} of the model’s`} answers are right, ${o(r.value)} with the learned λ (${t.sequences} questions). A guess among the values in the text gives ${o(t.floor)}.`:`the probability of “${H(e.piece)}” goes from ${o(r.value,1)} to ${o(e.value,1)}.`}function Hr({factors:t,task:e,points:r,lambdas:o}){let a=U(),[n,s]=ce(),i=t.filter(u=>u in r),{0:l,1:d}=r,c=r[i[0]]?.piece,h=e?1:Math.max(1e-9,...i.map(u=>r[u].value)),f=u=>qt/2+(s-qt)*(u-Z[0])/(Z[1]-Z[0]),p=u=>zt+(tt-zt-So)*(1-u/h),{factor:b,layers:x,heads:m}=o,w=Object.keys(x).length+Object.keys(m).length===0,M=Co(t,r,b);return g`
    <section class=${`strip ${e?"":"of-text"}`} ref=${n} aria-labelledby=${a("strip-title")} hidden=${!i.length}>
      <h2 id=${a("strip-title")}>${e?"Right answers":g`Probability of <b>${H(c??"")}</b>`} by λ, in %</h2>
      ${i.length>0&&s>qt&&g`
        <svg width=${s} height=${tt} role="img" aria-label=${i.map(u=>`λ × ${u}: ${I(r[u].value,e?0:1)}`).join(", ")}>
          ${e&&g`
            <line class="floor" x1=${f(Z[0])} x2=${f(Z[1])} y1=${p(e.floor)} y2=${p(e.floor)} />
            <text x=${f(Z[0])} y=${p(e.floor)-5}>a guess</text>`}
          <text x=${f(Z[0])} y=${tt-5}>λ ×</text>
          <line class="axis" x1=${f(Z[0])} x2=${f(Z[1])} y1=${p(0)} y2=${p(0)} />
          ${w&&g`<line class="now" x1=${f(b)} x2=${f(b)} y1=${zt-6} y2=${p(0)} />`}
          <path d=${`M${i.map(u=>`${f(u).toFixed(1)},${p(r[u].value).toFixed(1)}`).join("L")}`} />
          ${i.map(u=>g`
            <circle key=${`c${u}`} cx=${f(u)} cy=${p(r[u].value)} r="2.5" />
            <text key=${`v${u}`} x=${f(u)} y=${p(r[u].value)-8} text-anchor="middle">${I(r[u].value,e?0:1).replace(" %","")}</text>
            <text key=${`f${u}`} x=${f(u)} y=${tt-5} text-anchor="middle">${S(u,2).replace(/\.?0+$/,"")||"0"}</text>`)}
          ${w&&M!==null&&g`<circle class="now" cx=${f(b)} cy=${p(M)} r="5" />`}
        </svg>`}
      ${l&&d&&g`<p>Switch the second map off (λ × 0) and ${Oo(e,l,d)}</p>`}
      <p class="quiet">The learned λ of all heads are multiplied by the same factor.</p>
    </section>`}function Dr({data:t,source:e,view:r,refusal:o,onChange:a,onRefusal:n}){let s=U(),[i,l]=G(r.text),d=R(0),c=R(null),h=R(r.text);q(()=>{r.text!==h.current&&l(r.text),h.current=r.text},[r.text]);let f=(x,m=null)=>{clearTimeout(c.current),h.current=x,l(x),a({text:x,answer:m,added:ne,row:null})},p=x=>{l(x),clearTimeout(c.current),c.current=setTimeout(()=>f(x),350)},b=async()=>{try{d.current+=1;let x=await e.example({seed:d.current});f(x.text,x.answer)}catch(x){n({side:"left",message:x.message})}};return g`
    <section class="card text" aria-labelledby=${s("text-title")}>
      <div class="card-head">
        <h2 id=${s("text-title")}><label for=${s("text")}>Text</label></h2>
        ${e.live&&t.draws_examples&&g`<button type="button" class="link" onClick=${b}>Another question</button>`}
      </div>
      <textarea id=${s("text")} rows="4" spellcheck="false" readonly=${!e.live} value=${i}
        aria-describedby=${s("refused")} onInput=${x=>p(x.target.value)}></textarea>
      ${o&&g`<p id=${s("refused")} class="refused">${o.message}</p>`}
      ${e.live&&t.examples.length>0&&g`<p class="examples">
        ${t.examples.map(x=>g`<button type="button" class="chip" key=${x.title}
            onClick=${()=>f(x.text,x.answer)}>${x.title}</button>`)}
      </p>`}
      ${!e.live&&g`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var Ur={few:48,many:32},Eo=300;function Po(){let[t,e]=G(bt);return q(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),o=()=>e(bt());return r.addEventListener("change",o),()=>r.removeEventListener("change",o)},[]),t}function To(t,e){let r=t.examples[0],o={...mr,text:r?.text??"",answer:r?.answer??null};return t.opening&&(o.left=t.opening,t.models.right&&!o.answer&&(o.right=Br(t.opening,t.models.right))),wt(e,o,t.models)}var Br=({layer:t,head:e},{layers:r,heads:o})=>({layer:Math.min(t,r),head:Math.min(e,o)});function zo({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let o={layer:1,head:1,number:-1};return r.forEach((a,n)=>a.forEach((s,i)=>{s>o.number&&(o={layer:n+1,head:i+1,number:s})})),{layer:o.layer,head:o.head}}function Fr({data:t,source:e,root:r}){let{models:o}=t,a=Object.keys(o),n=Po(),s=e.hasAddress?location.hash:"",[i,l]=G(()=>To(t,s)),d=e.shown?.(i)??i,[c,h]=G({}),[f,p]=G({}),[b,x]=G({}),[m,w]=G(null),[M,u]=G(null),_=ee(()=>Object.fromEntries(["left","right"].map(y=>[y,{run:new Re,map:new Re}])),[]),$=R({}),v=R(!1),k=R(s.length>1?{left:!0,right:!0}:{left:!!t.opening}),A=lr(y=>l(P=>({...P,...y instanceof Function?y(P):y})),[]),C=y=>{let P={side:y,text:d.text};return d.added[y].length&&(P.append=d.added[y]),y==="left"&&te(d.lambdas)&&(P.lambdas=d.lambdas),P},z=y=>d.answer&&(y==="left"||t.shared_vocabulary)?{answer:d.answer}:{};for(let y of a){let P=C(y),ae={...P,...z(y)},oe=({answer:W,...K})=>e.run(W?{...K,answer:W}:K).catch(async V=>{if(!W)throw V;let F=await e.run(K);return y==="left"&&A(X=>X.answer===W?{answer:null}:{}),F});q(()=>{let W=o[y].layers*o[y].heads>64?Ur.many:Ur.few,K=V=>h(F=>({...F,[y]:F[y]&&{...F[y],waitsForHeads:V}}));K(!0),_[y].run.ask(async()=>{try{if(y==="right"&&await _.left.run.answered,y==="right"&&v.current){K(!1);return}let V=await oe(ae);if(y==="left"&&(v.current=!1),w(Q=>Q?.side===y?null:Q),h(Q=>({...Q,[y]:{heads:Q[y]?.heads,...V,asked:P,waitsForHeads:!V.heads}})),_[y].run.waits||V.heads)return;let F=await oe({...ae,picture:W});h(Q=>({...Q,[y]:{...F,asked:P}}));let X=k.current[y]?null:zo(F.heads);if(X&&(k.current[y]=!0),!X)return;A({[y]:X}),y==="left"&&o.right&&!d.answer&&!k.current.right&&A({right:Br(X,o.right)})}catch(V){K(!1),y==="left"&&(v.current=!0),y==="right"&&(h(({right:F,...X})=>X),p(({right:F,...X})=>X),$.current.right=void 0),w({side:y,message:V.message})}})},[JSON.stringify(ae)]);let se=d[y];q(()=>{_[y].map.ask(async()=>{try{if(y==="right"&&await _.left.run.answered,y==="right"&&v.current)return;let{append:W,...K}=P,V=JSON.stringify([K,se]),F=$.current[y],Q=F?.key===V&&F.append.every((pe,Yr)=>W?.[Yr]===pe)&&W?.length>F.append.length?F.maps.length:0,It={...P,layer:se.layer,head:se.head},Rt=await e.map(Q?{...It,first_row:Q}:It,F?.maps);$.current[y]={key:V,append:W??[],maps:Rt},p(pe=>({...pe,[y]:{...Rt,head:se}})),w(pe=>pe?.side===y&&pe.ofMap?null:pe)}catch(W){w(K=>K??{side:y,message:W.message,ofMap:!0})}})},[JSON.stringify([P,se])])}let{factors:E,task:N}=t.strip,{lambdas:D,...me}={...C("left"),...z("left")};q(()=>{let y=!1;return(async()=>{for(let P of E){await _.left.run.answered;let ae=y?null:await e.strip({...me,factor:P});if(y||(x(oe=>P===E[0]?{}:oe),ae.value===null))return;x(oe=>({...oe,[P]:ae}))}})().catch(()=>{}),()=>y=!0},[N?null:JSON.stringify(me)]);let re=c.left,xe=re?.tokens.length??0,nt=re&&re.asked.text!==d.text,O=Er(t,d),Ae=O?0:d.added.left.length?xe-1:d.answer?.query??xe-1,Kr=Math.max(0,Math.min(M??d.row??Ae,xe-1));q(()=>{r.dataset.theme=n;let y=!o.right||f.right||m?.side==="right";r.dataset.ready=String(!!(re?.heads&&f.left&&y))}),q(()=>{if(!e.hasAddress)return;let y=setTimeout(()=>history.replaceState(null,"",Te(d)),Eo);return()=>clearTimeout(y)},[Te(d)]),q(()=>{if(!e.hasAddress)return;let y=()=>l(P=>wt(location.hash,P,o));return addEventListener("hashchange",y),()=>removeEventListener("hashchange",y)},[]);let Jr=a.map(y=>{let{heads:P,waitsForHeads:ae}=c[y]??{},{layer:oe,head:se}=d[y],W=m?.side!==y&&(!P||!!ae);return ee(()=>{let K=V=>{k.current[y]=!0,A({[y]:V})};return g`<${Cr} key=${y} side=${y} model=${o[y]} heads=${P} isBusy=${W} chosen=${{layer:oe,head:se}}
        theme=${n} onChoose=${K} />`},[P,W,oe,se,n])}),Xr=y=>A({lambdas:y});return g`
    <header class="top">
      ${t.pairs?.length>1&&g`<nav class="pairs" aria-label="Models">
        <span class="quiet">Models</span>
        ${t.pairs.map(({name:y,address:P})=>g`<a key=${y} href=${P}
            aria-current=${location.pathname===P?"page":null}>${y}</a>`)}
      </nav>`}
      <h1>What the second map does</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the ${O?"image":"text"} twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        <strong>Move λ</strong> and watch what the model attends to, ${O?"which class it sees":"what it would write next"}, and how well it does.
      </p>
      ${o.left.note&&g`<p class="note">${o.left.note}</p>`}
    </header>
    ${m&&g`<p class="refusal" role="alert">${m.message}</p>`}
    <main class=${`layout ${nt?"stale":""}`}>
      <div class="controls">
        <${Lr} model=${o.left} run=${re} place=${d.left} lambdas=${d.lambdas} onChange=${Xr} />
        <${Hr} factors=${E} task=${N} points=${b} lambdas=${d.lambdas} />
        <${Nr} run=${re} right=${c.right} models=${o} theme=${n} />
        ${O?g`<${Tr} data=${t} view=${d} onChange=${A} />`:g`
        <${Dr} data=${t} source=${e} view=${d} refusal=${m} onChange=${A}
          onRefusal=${w} />
        <${gr} models=${o} runs=${c} view=${d} wanted=${i} source=${e} question=${C}
          onChange=${A} onRefusal=${w} />`}
      </div>
      <div class="pictures">
        <${Ir} models=${o} runs=${c} maps=${f} view=${d} image=${O} theme=${n} row=${Kr} hovered=${M}
          shared=${t.shared_vocabulary} onHover=${u} onChange=${A} live=${e.live} hasAddress=${e.hasAddress} />
        <div class="grids">${Jr}</div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" target="_blank" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${a.map(y=>`${o[y].name}: ${o[y].label}, ${qo(o[y])}`).join("; ")}.
      </p>
    </footer>
  `}function qo({layers:t,heads:e,kv_heads:r}){let o=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${o}`}var Io=(t,e)=>t.reduce((r,o)=>Math.abs(o.value-e)<Math.abs(r.value-e)?o:r),Wr=t=>t.reduce((e,r)=>e+r,0),rt=class{live=!1;hasAddress=location.protocol!=="about:";#e=new Map;constructor({recorded:e,models:r,examples:o,strip:a}){this.recorded=e,this.models=r,[this.example]=o,this.measured=a}shown(e){let r=Object.fromEntries(Object.entries(this.recorded).map(([n,{tokens:s,runs:i}])=>{let l=s.slice(s.length-i.length+1);return[n,l.slice(0,e.added[n].length)]})),{text:o,answer:a}=this.example;return{...e,text:o,answer:a,added:te(e.lambdas)?ne:{...ne,...r}}}async run({side:e,append:r=[],lambdas:o,answer:a,picture:n}){let{tokens:s,pieces:i,learned_lambdas:l,runs:d,moved:c}=this.recorded[e],h=s.length-d.length+1+r.length,f={tokens:s.slice(0,h),pieces:i.slice(0,h),learned_lambdas:l,...d[r.length]};if(o){let{factor:p,layers:b,heads:x}=o,m=Object.entries({...p===1?{}:{factor:p},...b,...x}),[w,M]=m[0];if(m.length>1||!(w in c))f.is_recorded=!1;else{let u=Io(c[w],M);Object.assign(f,u.run,{recorded_at:u.value})}}return n&&(f.heads=this.#t(e,h,o,a,n)),f}async map({side:e,append:r=[],layer:o,head:a,lambdas:n}){let{tokens:s,runs:i}=this.recorded[e];return kt(this.#r(e,o,a,n),s.length-i.length+1+r.length)}async next({side:e,append:r=[]}){let{tokens:o,runs:a}=this.recorded[e];return{token:o[o.length-a.length+1+r.length]}}strip=async({factor:e})=>this.measured.points[this.measured.factors.indexOf(e)];#t(e,r,o,a,n){let{layers:s,heads:i,subtracts:l}=this.models[e],d=Math.min(n,r),c=new Int8Array(s*i*d*d),f={rollout:o?null:this.recorded[e].rollout,removed:l?[]:null,on_answer:a?[]:null,picture_size:d,pictures:c};for(let p=1,b=0;p<=s;p++){f.removed?.push([]),f.on_answer?.push([]);for(let x=1;x<=i;x++,b++){let m=kt(this.#r(e,p,x,o),r),w=Je(m,be(o??$e,{layer:p,head:x}));if(l){let $=0;for(let v=0;v<w.length;v++)$+=Math.max(0,Math.min(m.first[v],m.first[v]-w[v]));f.removed.at(-1).push($/r)}if(a){let $=J(w,r,a.query).map(Math.abs);f.on_answer.at(-1).push(Wr($.subarray(a.begin,a.end))/(Wr($)||1))}let M=ze(r,w),_=At(w,r,d).map($=>Math.round(127*Math.sign($)*Math.sqrt(Math.min(1,Math.abs($)/M))));c.set(_,b*d*d)}}return f}#r(e,r,o,{factor:a}=$e){let n=`${e} ${r}.${o}`;this.#e.has(n)||this.#e.set(n,we(Xe(this.recorded[e].maps[`${r}.${o}`])));let{lam:s,...i}=this.#e.get(n);return{...i,lam:s?.map(l=>a*l)}}};var ot=class{live=!0;hasAddress=!1;#e=new Map;#t=0;constructor(e){this.model=e,e.on("msg:custom",({id:r,error:o,answer:a},n)=>{let s=this.#e.get(r);s&&(this.#e.delete(r),o?s.reject(new Me(o)):s.resolve(n?.length?Ro(n[0]):a))})}#r(e,r){let o=`${this.#t++} ${Math.random()}`;return new Promise((a,n)=>{this.#e.set(o,{resolve:a,reject:n}),this.model.send({id:o,name:e,question:r})})}run=e=>this.#r("run",e);map=async(e,r)=>we(await this.#r("map",e),r);next=e=>this.#r("next",e);example=e=>this.#r("example",e);strip=e=>this.#r("strip",e)},Ro=t=>t instanceof ArrayBuffer?t:t.buffer.slice(t.byteOffset,t.byteOffset+t.byteLength);function Vr(t,e,r,o=""){t.classList.add("explorer");let a=g`<${Fr} data=${e} source=${r} root=${t} />`;Fe(g`<${vt.Provider} value=${o}>${a}<//>`,t)}function Lo({model:t,el:e}){return e.addEventListener("focusin",({target:r})=>r.dataset.lmSuppressShortcuts="true"),Vr(e,t.get("described"),new ot(t),`explorer-${Math.random().toString(36).slice(2)}-`),()=>Fe(null,e)}var bs={render:Lo},Gr=document.getElementById("explorer-data");if(Gr){let t=JSON.parse(Gr.textContent),e=t.mode==="recorded"?new rt(t):new et;Vr(document.getElementById("explorer"),t,e)}export{bs as default};
